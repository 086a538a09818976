"""The layout of DFlash's authors (z-lab): a Qwen3 configuration with ``dflash_config``. Read, and not written.

It borrows embedding and LM head from its target when it runs. Its mask is a token of the target, or lies beside it as
``mask_embedding.pt``; its ``target_layer_ids`` name layers by their output: the tap is one more. For engines that are
to load a head of outpace there is ``--layout speculators``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.heads.base import HeadConfig
from outpace.heads.layouts.base import Foreign, Layout, Names
from outpace.heads.layouts.reading import (
    decoder_shapes,
    layer_ids,
    number,
    options_of,
    renamed,
    same_size,
    target_facts,
    weight_names,
)
from outpace.heads.layouts.speculators import is_causal, mask_row
from outpace.targets.base import Target

_MASK = "mask_embedding"


class ZLab(Layout):
    """DFlash's own layout."""

    name: ClassVar[str] = "z-lab"
    kinds: ClassVar[tuple[str, ...]] = ("dflash",)
    writes: ClassVar[bool] = False

    def kind_of(self, config: Mapping[str, Any], names: Names) -> str | None:
        return "dflash" if isinstance(config.get("dflash_config"), Mapping) else None

    def understand(self, config: Mapping[str, Any], tensors: dict[str, Tensor], target: Target, where: Path) -> Foreign:
        special = config["dflash_config"]
        same_size("number of layers", config.get("num_target_layers", target.num_layers), target.num_layers, where)
        block = number({**special, **config}, "block_size", where, None, 2)
        shapes = decoder_shapes(config, target, where)
        options = {"layers": shapes["layers"], "block": block, "causal": is_causal(special, config, where)}
        known = HeadConfig(
            kind="dflash",
            target=target_facts(target, config.get("_name_or_path")),
            aux_hidden_state_layers=layer_ids(special, "target_layer_ids", where, target, shift=1),
            vocabulary=target.vocab_size,
            options=options_of("dflash", options, where),
            **shapes,
        )
        called = {name: name for name in weight_names(known)}
        found = renamed(called, tensors, ("embed_tokens.weight", "lm_head.weight"), where)
        if _MASK not in found:
            found[_MASK] = mask_row(special.get("mask_token_id"), None, target, where)
        return Foreign(known, {**found, "words.ids": torch.arange(target.vocab_size)}, called)

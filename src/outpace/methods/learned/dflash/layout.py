"""DFlash heads as other engines store them: vLLM's ``speculators``, and the layout of DFlash's authors (z-lab).

Verified in speculators:

* The mask is a token. outpace's mask is an embedding of its own, and is written in the place of a token that no text
  uses. vLLM runs with that embedding, and takes ``mask_embedding.pt`` beside it for the same; the library
  ``speculators`` itself puts the target's embedding back when it loads a dflash head to train it further.
* Blocks are causal in layers of sliding attention; a window as wide as the context leaves the rest as it is. vLLM takes
  ``sliding_window_non_causal`` for all layers, those of full attention too.

z-lab's layout is read and not written: a Qwen3 configuration with ``dflash_config``. It borrows embedding and LM head
from its target when it runs. Its mask is a token of the target, or lies beside it as ``mask_embedding.pt``; its
``target_layer_ids`` name layers by their output.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.layouts.base import D2T, About, Layout, StoredHead
from outpace.heads.layouts.files import HeadFiles, Package, load_pickle
from outpace.heads.layouts.reading import (
    decoder_shapes,
    head_config,
    layer_ids,
    number,
    options_of,
    refused,
    renamed,
    same_size,
    target_facts,
    weight_names,
)
from outpace.heads.layouts.registry import layout
from outpace.heads.layouts.speculators import SpeculatorsLayout
from outpace.heads.layouts.writing import EMBEDDING, LM_HEAD, decoder_config
from outpace.targets.base import Target

_MASK, _MASK_FILE = "mask_embedding", "mask_embedding.pt"


@layout
class DFlashSpeculators(SpeculatorsLayout):
    """``speculators``."""

    kind: ClassVar[str] = "dflash"
    architecture: ClassVar[str] = "DFlashSpeculator"
    layers_key: ClassVar[str] = "aux_hidden_state_layer_ids"

    def fields(self, head: Head, target: Target) -> dict[str, Any]:
        config, causal = decoder_config(head.config, target, "qwen3"), head.options.causal
        config |= {
            "layer_types": ["sliding_attention" if causal else "full_attention"] * head.config.layers,
            "use_sliding_window": causal,
            "sliding_window": config["max_position_embeddings"] if causal else None,
            "max_window_layers": 0 if causal else head.config.layers,
        }
        return {
            "transformer_layer_config": config,
            "block_size": head.options.block,
            "sliding_window_non_causal": not causal,
            "sample_from_anchor": False,
        }

    def draft_length(self, head: Head) -> int:
        assert head.longest_draft is not None
        return head.longest_draft

    def options(self, files: HeadFiles, inner: Mapping[str, Any], layers: int) -> dict[str, Any]:
        config, where = files.config, files.path
        if config.get("sample_from_anchor"):
            raise refused(where, "drafts from its first row as well (sample_from_anchor), which is not read")
        block = number(config, "block_size", where, 8, 2)
        return {"layers": layers, "block": block, "causal": _is_causal(config, inner, where)}

    def package(self, head: Head, target: Target, about: About) -> Package:
        token, package = _idle_token(head, about, target), super().package(head, target, about)
        rows = package.tensors[EMBEDDING]
        rows[token] = package.tensors.pop(_MASK)
        package.config["mask_token_id"] = token
        package.saved[_MASK_FILE] = {"mask_token_id": token, "embedding": rows[token].clone()}
        return package

    def read(self, files: HeadFiles, target: Target) -> StoredHead:
        found, token = super().read(files, target), files.config.get("mask_token_id")
        found.tensors[_MASK] = _mask_row(token, found.embedding, target, files.path)
        found.called = {**found.called, _MASK: EMBEDDING}
        found.masked = token
        return found


@layout
class ZLabLayout(Layout):
    """The layout of DFlash's authors."""

    name: ClassVar[str] = "z-lab"
    kind: ClassVar[str] = "dflash"
    writes: ClassVar[bool] = False

    def kind_of(self, files: HeadFiles) -> str | None:
        return self.kind if isinstance(files.config.get("dflash_config"), Mapping) else None

    def read(self, files: HeadFiles, target: Target) -> StoredHead:
        config, where = files.config, files.path
        special = config["dflash_config"]
        same_size("number of layers", config.get("num_target_layers", target.num_layers), target.num_layers, where)
        block = number({**special, **config}, "block_size", where, None, 2)
        shapes = decoder_shapes(config, target, where)
        options = {"layers": shapes["layers"], "block": block, "causal": _is_causal(special, config, where)}
        known = head_config(
            where,
            kind=self.kind,
            target=target_facts(target, config.get("_name_or_path")),
            aux_hidden_state_layers=layer_ids(special, "target_layer_ids", where, shift=1),
            vocabulary=target.vocab_size,
            options=options_of(self.kind, options, where),
            **shapes,
        )
        found = renamed({name: name for name in weight_names(known, where)}, files.tensors, (EMBEDDING, LM_HEAD), where)
        if _MASK not in found:
            found[_MASK] = _mask_row(special.get("mask_token_id"), None, target, where)
        return StoredHead(known, {**found, D2T: torch.arange(target.vocab_size)})


def _idle_token(head: Head, about: About, target: Target) -> int:
    """The token in whose place a mask's embedding is written. Raises BadInput where the vocabulary has no room."""
    if about.idle is not None:
        return about.idle
    free = (head.draft_vocabulary.t2d(target.vocab_size) < 0).nonzero()[:, 0]
    if not len(free):
        raise BadInput(f"'{about.name}' uses all of its tokens: none is left to stand for this head's mask")
    return int(free[-1])


def _mask_row(token: object, rows: Tensor | None, target: Target, where: Path) -> Tensor:
    """(hidden,): the mask's embedding, from a file of its own, the head's embedding, or the target's."""
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < target.vocab_size:
        raise refused(where, f"names no mask token of this model: mask_token_id is {token}")
    if (where / _MASK_FILE).is_file():
        found = load_pickle(where / _MASK_FILE)
        found = found.get("embedding") if isinstance(found, Mapping) else found
        if not isinstance(found, Tensor) or found.numel() != target.hidden_size:
            raise refused(where, f"has a {_MASK_FILE} that is no embedding of this model", "shapes")
        return found.reshape(-1)
    if rows is not None and token < len(rows):
        return rows[token]
    return target.embed(torch.tensor([token]))[0].cpu()


def _is_causal(config: Mapping[str, Any], inner: Mapping[str, Any], where: Path) -> bool:
    """Whether rows of a block see only the rows before them. Raises IncompatibleHead for windows over the context."""
    named = inner.get("layer_types") or ["full_attention"]
    types = {str(one) for one in named} if isinstance(named, list) else {str(named)}
    if types == {"full_attention"}:
        return False
    context, window = number(inner, "max_position_embeddings", where, 8192), inner.get("sliding_window")
    if types != {"sliding_attention"} or not isinstance(window, int) or window < context:
        raise refused(where, "has layers that see a window of the context, which is not read")
    return not config.get("sliding_window_non_causal")

"""EAGLE's own layout (SafeAILab), for eagle and eagle3: a flat ``config.json`` of a Llama, one file of tensors.

What is verified there:

* eagle3: its one layer is ``midlayer``; ``d2t`` (offsets) and ``t2d`` as in speculators. EAGLE itself always reads the
  streams that enter layers 2, half and last but two. Other engines let the configuration say: vLLM's
  ``eagle_aux_hidden_state_layer_ids`` are those numbers, the ``eagle_config`` of SGLang and SpecForge names the layers
  whose output it is, one less. Both are written.
* eagle: ``fc`` with or without a bias (``bias``), layer 0 without its first norm. What it reads and makes are states
  behind the target's final norm, for the target's own LM head: none is stored, and no vocabulary map. Where a head's
  words are some of the tokens, those lie beside it as ``token_map.pt``, for SGLang's ``--speculative-token-map``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.heads.base import Head, HeadConfig, find_kind
from outpace.heads.layouts.base import About, Foreign, Layout, Names
from outpace.heads.layouts.files import Package, load_pickle
from outpace.heads.layouts.reading import (
    check_ids,
    decoder_shapes,
    layer_ids,
    lm_head,
    options_of,
    refused,
    renamed,
    target_facts,
    vocabulary,
    weight_names,
)
from outpace.heads.layouts.speculators import eagle3_options, in_layer_order, mapped
from outpace.heads.layouts.writing import bf16, decoder_config, embedding
from outpace.targets.base import Target

_EMBEDDING, _ROWS, _IDS = "embed_tokens.weight", "lm_head.weight", "eagle_aux_hidden_state_layer_ids"
MAP = "token_map.pt"


class EagleLayout(Layout):
    """EAGLE's layout."""

    name: ClassVar[str] = "eagle"
    kinds: ClassVar[tuple[str, ...]] = ("eagle", "eagle3")

    def kind_of(self, config: Mapping[str, Any], names: Names) -> str | None:
        if "draft_vocab_size" in config and "speculators_model_type" not in config:
            return "eagle3"
        if config.get("model_type", "llama") not in ("llama", "eagle") or "speculators_model_type" in config:
            return None
        return "eagle" if names() & {"fc.weight", "model.fc.weight"} else None

    def express(self, head: Head, target: Target, about: About) -> Package:
        config = {"architectures": ["LlamaForCausalLM"], **decoder_config(head.config, target, "llama")}
        return _eagle3(head, target, config) if head.kind == "eagle3" else _eagle(head, target, config)

    def understand(self, config: Mapping[str, Any], tensors: dict[str, Tensor], target: Target, where: Path) -> Foreign:
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
        read = _read_eagle3 if "draft_vocab_size" in config else _read_eagle
        return read(config, tensors, target, where)


def _eagle3(head: Head, target: Target, config: dict[str, Any]) -> Package:
    if head.options.norms == "attdrift":
        raise BadInput("layout 'eagle' has no place for the norms of attdrift; write it with --layout speculators")
    if head.options.residual == "normed":
        raise BadInput("layout 'eagle' adds to the state as it is (residual=state); write it with --layout speculators")
    aux_hidden_state_layers = sorted(head.config.aux_hidden_state_layers)
    config |= {"draft_vocab_size": len(head.words), _IDS: aux_hidden_state_layers}
    if aux_hidden_state_layers[0] > 0:
        config["eagle_config"] = {"use_aux_hidden_state": True, _IDS: [tap - 1 for tap in aux_hidden_state_layers]}
    own = {name.replace("layers.0.", "midlayer."): value for name, value in in_layer_order(head).items()}
    return Package(config, {_EMBEDDING: embedding(target), **mapped(head, target), **own})


def _read_eagle3(config: Mapping[str, Any], tensors: dict[str, Tensor], target: Target, where: Path) -> Foreign:
    options = eagle3_options(config, config, where)
    nested, aux_hidden_state_layers = (
        config.get("eagle_config"),
        find_kind("eagle3").aux_layers_of(target.num_layers, None),
    )
    if _IDS in config:
        aux_hidden_state_layers = layer_ids(config, _IDS, where, target)
    elif isinstance(nested, Mapping) and _IDS in nested:
        aux_hidden_state_layers = layer_ids(nested, _IDS, where, target, shift=1)
    ids = vocabulary(tensors, target, where)
    if config["draft_vocab_size"] not in (None, len(ids)):
        raise refused(
            where, f"has a d2t of {len(ids)} tokens; its configuration says {config['draft_vocab_size']}", "vocabulary"
        )
    known = HeadConfig(
        kind="eagle3",
        target=target_facts(target, config.get("_name_or_path")),
        aux_hidden_state_layers=tuple(sorted(aux_hidden_state_layers)),
        vocabulary=len(ids),
        options=options_of("eagle3", options, where),
        **decoder_shapes(config, target, where),
    )
    middle = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    called = {name: name.replace("layers.0.", middle).replace("tap_norms.", "fc_norm.") for name in weight_names(known)}
    found = renamed(called, tensors, ("d2t", "t2d", _EMBEDDING, _ROWS), where)
    found |= lm_head(tensors.get(_ROWS), ids, target, where)
    return Foreign(known, found, called, tensors.get(_EMBEDDING))


def _eagle(head: Head, target: Target, config: dict[str, Any]) -> Package:
    if head.words.own:
        raise BadInput(
            "layout 'eagle' takes the target's LM head for an eagle head; this one has an LM head of its own"
        )
    own = {name: bf16(value) for name, value in head.state_dict().items() if name[:6] != "words."}
    package = Package(config | {"bias": head.options.bias}, {_EMBEDDING: embedding(target), **own})
    if len(head.words) < target.vocab_size:
        package.saved[MAP] = head.words.ids.cpu().long()
    return package


def _read_eagle(config: Mapping[str, Any], tensors: dict[str, Tensor], target: Target, where: Path) -> Foreign:
    ids = read_map(where, target)
    known = HeadConfig(
        kind="eagle",
        target=target_facts(target, config.get("_name_or_path")),
        aux_hidden_state_layers=(target.num_layers,),
        vocabulary=len(ids),
        options=options_of("eagle", {"bias": "fc.bias" in tensors}, where),
        **decoder_shapes(config, target, where),
    )
    if known.layers != 1:
        raise refused(where, f"has {known.layers} layers; eagle has one here")
    called = {name: name for name in weight_names(known)}
    found = renamed(called, tensors, (_EMBEDDING, _ROWS), where)
    return Foreign(known, found | {"words.ids": ids}, called, tensors.get(_EMBEDDING))


def read_map(where: Path, target: Target) -> Tensor:
    """The tokens of ``token_map.pt``, all of them where there is none. Raises BadInput for what is no map."""
    if not (where / MAP).is_file():
        return torch.arange(target.vocab_size)
    found = load_pickle(where / MAP)
    return check_ids(found if isinstance(found, Tensor) else torch.tensor(found), target, where, MAP)

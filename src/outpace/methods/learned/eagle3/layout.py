"""EAGLE-3 heads as other engines store them: EAGLE's own layout, and vLLM's ``speculators``.

Verified there:

* EAGLE's own (SafeAILab): a flat configuration of a Llama; the one layer is ``midlayer``; ``d2t`` and ``t2d`` as in
  speculators. EAGLE itself always reads the streams that enter layers 2, half and last but two. Other engines let the
  configuration say: vLLM's ``eagle_aux_hidden_state_layer_ids`` are those numbers; the ``eagle_config`` of SGLang and
  SpecForge names the layers whose output it is, one less. Both are written. The architecture is SpecForge's
  ``LlamaForCausalLMEagle3``, which SGLang and vLLM both know.
* speculators: ``norm_before_residual`` is always written: vLLM takes its absence for true.
* Both: ``fc_norm`` (a norm for each auxiliary hidden state before ``fc``) together with ``norm_output`` (the final
  norm's output goes on to the next row) is outpace's ``norms="attdrift"``, which others call EAGLE 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from outpace.core.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.head_config import low_middle_high
from outpace.heads.layouts.base import D2T, ROWS, About, Layout, StoredHead
from outpace.heads.layouts.files import HeadFiles, Package
from outpace.heads.layouts.reading import (
    decoder_shapes,
    head_config,
    layer_ids,
    number,
    options_of,
    refused,
    renamed,
    target_facts,
    vocabulary,
    weight_names,
)
from outpace.heads.layouts.registry import layout
from outpace.heads.layouts.speculators import TYPE, SpeculatorsLayout
from outpace.heads.layouts.writing import EMBEDDING, LM_HEAD, decoder_config, in_layer_order, mapped
from outpace.targets.base import Target

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURE = "LlamaForCausalLMEagle3"
_NORMED = "norm_before_residual"
_FLAGS = ("norm_before_fc", "norm_output", "fc_norm", _NORMED)


@layout
class Eagle3Layout(Layout):
    """EAGLE's own layout."""

    name: ClassVar[str] = "eagle"
    kind: ClassVar[str] = "eagle3"

    def kind_of(self, files: HeadFiles) -> str | None:
        return self.kind if "draft_vocab_size" in files.config and TYPE not in files.config else None

    def package(self, head: Head, target: Target, about: About) -> Package:
        _plain(head, self.name)
        if head.options.residual == "normed":
            raise BadInput(
                "layout 'eagle' adds to the state as it is (residual=state); write it with --layout speculators"
            )
        layers = sorted(head.config.aux_hidden_state_layers)
        config = {"architectures": [_ARCHITECTURE], **decoder_config(head.config, target, "llama"), **_norms(head)}
        config |= {"draft_vocab_size": len(head.draft_vocabulary), _LAYERS: layers}
        if layers[0] > 0:
            config["eagle_config"] = {"use_aux_hidden_state": True, _LAYERS: [layer - 1 for layer in layers]}
        own = {name.replace("layers.0.", "midlayer."): value for name, value in in_layer_order(head).items()}
        return Package(config, {**mapped(head, target), **own})

    def read(self, files: HeadFiles, target: Target) -> StoredHead:
        config, where = files.config, files.path
        tensors = {name.removeprefix("model."): value for name, value in files.tensors.items()}
        inside, layers = config.get("eagle_config"), low_middle_high(target.num_layers)
        nested: Mapping[str, Any] = inside if isinstance(inside, Mapping) else {}
        told = {**config, **{key: nested[key] for key in _FLAGS if key in nested}}  # vLLM reads the nested ones first
        options = _options(told, config, where) | {"residual": "normed" if told.get(_NORMED) else "state"}
        if _LAYERS in config:
            layers = layer_ids(config, _LAYERS, where)
        elif _LAYERS in nested:
            layers = layer_ids(nested, _LAYERS, where, shift=1)
        ids = vocabulary(tensors, config, target, where)
        known = head_config(
            where,
            kind=self.kind,
            target=target_facts(target, config.get("_name_or_path")),
            aux_hidden_state_layers=tuple(sorted(layers)),
            vocabulary=len(ids),
            options=options_of(self.kind, options, where),
            **decoder_shapes(config, target, where),
        )
        middle = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
        called = {name: name.replace("layers.0.", middle) for name in weight_names(known, where)} | {ROWS: LM_HEAD}
        found = renamed(called, tensors, ("d2t", "t2d", EMBEDDING), where)
        return StoredHead(known, {**found, D2T: ids}, {**called, D2T: "d2t"}, embedding=tensors.get(EMBEDDING))


@layout
class Eagle3Speculators(SpeculatorsLayout):
    """``speculators``."""

    kind: ClassVar[str] = "eagle3"
    architecture: ClassVar[str] = "Eagle3Speculator"
    layers_key: ClassVar[str] = _LAYERS

    def fields(self, head: Head, target: Target) -> dict[str, Any]:
        _plain(head, self.name)
        return {
            "transformer_layer_config": decoder_config(head.config, target, "llama"),
            _NORMED: head.options.residual == "normed",
            "norm_before_fc": False,
            **_norms(head),
            "embed_requires_grad": False,
        }

    def layers(self, files: HeadFiles, target: Target) -> Sequence[int]:
        # speculators writes null for the layers that it takes by default.
        named = files.config.get(_LAYERS) is not None
        return super().layers(files, target) if named else low_middle_high(target.num_layers)

    def draft_length(self, head: Head) -> int:
        return int(head.options.steps)

    def options(self, files: HeadFiles, inner: Mapping[str, Any], layers: int) -> dict[str, Any]:
        before = files.config.get(_NORMED, True)
        return _options(files.config, inner, files.path) | {"residual": "normed" if before else "state"}


def _plain(head: Head, layout: str) -> None:
    """Raise BadInput for a head whose layer is no Llama's."""
    if head.options.qk_norm:
        raise BadInput(f"layout '{layout}' has no norms of queries and keys (qk_norm=true); train without them")


def _norms(head: Head) -> dict[str, bool]:
    """The norms of EAGLE 3.1, which outpace has together or not at all."""
    drift = head.options.norms == "attdrift"
    return {"fc_norm": drift, "norm_output": drift}


def _options(config: Mapping[str, Any], inner: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The settings that both layouts tell. Raises IncompatibleHead for another network than ``network.py``'s."""
    if config.get("norm_before_fc"):
        raise refused(where, "norms all states at once (norm_before_fc), which is not read")
    if bool(config.get("fc_norm")) != bool(config.get("norm_output")):
        raise refused(where, "has one of fc_norm and norm_output; both are read, or neither")
    if inner.get("model_type", "llama") != "llama":
        raise refused(where, f"has a layer of {inner['model_type']}, which is not read (llama is)")
    if number(inner, "num_hidden_layers", where, 1) != 1:
        raise refused(where, f"has {inner['num_hidden_layers']} layers; eagle3 has one here")
    return {"norms": "attdrift" if config.get("fc_norm") else "eagle3"}

"""The layout of vLLM's ``speculators`` (version 0.9), which vLLM serves as it is: what all kinds of heads have in it.

Verified there, and different from other layouts:

* ``d2t`` holds offsets: draft token ``i`` is the target's token ``i + d2t[i]``; ``t2d`` marks the target's tokens that
  can be drafted. Both are absent where all tokens can be.
* The auxiliary layers are named by the residual stream that enters them, as outpace has them. States come in the order
  of the layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from outpace.heads.base import Head
from outpace.heads.layouts.base import D2T, ROWS, About, Layout, StoredHead
from outpace.heads.layouts.files import HeadFiles, Package
from outpace.heads.layouts.reading import (
    decoder_shapes,
    head_config,
    layer_ids,
    options_of,
    refused,
    renamed,
    target_facts,
    vocabulary,
    weight_names,
)
from outpace.heads.layouts.writing import EMBEDDING, LM_HEAD, in_layer_order, mapped
from outpace.targets.base import Target

VERSION = "0.9.0"
TYPE = "speculators_model_type"


class SpeculatorsLayout(Layout):
    """``config.json`` with ``speculators_config``, one file of tensors. A kind adds its own fields."""

    name: ClassVar[str] = "speculators"
    architecture: ClassVar[str]
    layers_key: ClassVar[str]
    """The field that names the auxiliary layers."""

    @abstractmethod
    def fields(self, head: Head, target: Target) -> dict[str, Any]:
        """The fields of the configuration that only this kind has, ``transformer_layer_config`` among them."""

    @abstractmethod
    def draft_length(self, head: Head) -> int:
        """How many tokens engines draft by default."""

    @abstractmethod
    def options(self, files: HeadFiles, inner: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """The kind's own settings. ``inner``: the layers' configuration; ``layers``: how many there are."""

    def layers(self, files: HeadFiles, target: Target) -> Sequence[int]:
        """The auxiliary layers. Raises IncompatibleHead where the configuration does not say."""
        return layer_ids(files.config, self.layers_key, files.path)

    def kind_of(self, files: HeadFiles) -> str | None:
        return self.kind if files.config.get(TYPE) == self.kind else None

    def package(self, head: Head, target: Target, about: About) -> Package:
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": self.draft_length(head),
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        config = {
            "architectures": [self.architecture],
            TYPE: self.kind,
            "speculators_version": VERSION,
            "speculators_config": {
                "algorithm": self.kind,
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": about.name, "architectures": [about.architecture]},
            },
            "draft_vocab_size": len(head.draft_vocabulary),
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            self.layers_key: sorted(head.config.aux_hidden_state_layers),
            **self.fields(head, target),
        }
        return Package(config, {**mapped(head, target), **in_layer_order(head)})

    def read(self, files: HeadFiles, target: Target) -> StoredHead:
        config, where, tensors = files.config, files.path, files.tensors
        inner = config.get("transformer_layer_config")
        if not isinstance(inner, Mapping):
            raise refused(where, "has no transformer_layer_config")
        shapes = decoder_shapes({**inner, "target_hidden_size": config.get("target_hidden_size")}, target, where)
        ids = vocabulary(tensors, config, target, where)
        inside = config.get("speculators_config")
        verifier = inside.get("verifier") if isinstance(inside, Mapping) else None
        known = head_config(
            where,
            kind=self.kind,
            target=target_facts(target, verifier.get("name_or_path") if isinstance(verifier, Mapping) else None),
            aux_hidden_state_layers=tuple(sorted(self.layers(files, target))),
            vocabulary=len(ids),
            options=options_of(self.kind, self.options(files, inner, shapes["layers"]), where),
            **shapes,
        )
        called = {**{name: name for name in weight_names(known, where)}, ROWS: LM_HEAD}
        found = renamed(called, tensors, ("d2t", "t2d", EMBEDDING), where)
        return StoredHead(known, {**found, D2T: ids}, {**called, D2T: "d2t"}, embedding=tensors.get(EMBEDDING))

"""EAGLE-1 heads in EAGLE's own layout (SafeAILab): a flat configuration of a Llama, one file of tensors.

Verified there: ``fc`` with or without a bias, layer 0 without its first norm. vLLM loads an ``fc`` without a bias, and
SGLang one with a bias, under an architecture of its own; EAGLE's own code gives a head without one a random bias. No
``bias`` is written into the configuration: engines take it for a bias of attention. The head reads and predicts states
behind the target's final norm, for the target's own LM head: neither an LM head nor a vocabulary map is stored. A
reduced vocabulary lies beside it as ``token_map.pt``, for SGLang's ``--speculative-token-map``.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.layouts.base import D2T, About, Layout, StoredHead
from outpace.heads.layouts.files import HeadFiles, Package, load_pickle
from outpace.heads.layouts.reading import (
    decoder_shapes,
    head_config,
    options_of,
    refused,
    renamed,
    target_facts,
    weight_names,
)
from outpace.heads.layouts.registry import layout
from outpace.heads.layouts.speculators import TYPE
from outpace.heads.layouts.writing import EMBEDDING, LM_HEAD, bf16, decoder_config, embedding
from outpace.targets.base import Target

MAP = "token_map.pt"


@layout
class EagleLayout(Layout):
    """EAGLE's own layout."""

    name: ClassVar[str] = "eagle"
    kind: ClassVar[str] = "eagle"

    def kind_of(self, files: HeadFiles) -> str | None:
        config = files.config
        if config.get("model_type", "llama") not in ("llama", "eagle") or {"draft_vocab_size", TYPE} & set(config):
            return None
        return self.kind if files.names & {"fc.weight", "model.fc.weight"} else None

    def package(self, head: Head, target: Target, about: About) -> Package:
        if head.draft_vocabulary.own:
            raise BadInput(
                "layout 'eagle' takes the target's LM head for an eagle head; this one has an LM head of its own"
            )
        architecture = "LlamaForCausalLMEagle" if head.options.bias else "LlamaForCausalLM"  # SGLang's, or vLLM's
        config = {"architectures": [architecture], **decoder_config(head.config, target, "llama")}
        own = {name: bf16(value) for name, value in head.own_weights().items()}
        package = Package(config, {EMBEDDING: embedding(target), **own})
        if len(head.draft_vocabulary) < target.vocab_size:
            package.saved[MAP] = head.draft_vocabulary.d2t.cpu()
        return package

    def read(self, files: HeadFiles, target: Target) -> StoredHead:
        config, where = files.config, files.path
        tensors = {name.removeprefix("model."): value for name, value in files.tensors.items()}
        ids = _token_map(where, target)
        known = head_config(
            where,
            kind=self.kind,
            target=target_facts(target, config.get("_name_or_path")),
            aux_hidden_state_layers=(target.num_layers,),
            vocabulary=ids.numel(),
            options=options_of(self.kind, {"bias": "fc.bias" in tensors}, where),
            **decoder_shapes(config, target, where),
        )
        if known.layers != 1:
            raise refused(where, f"has {known.layers} layers; eagle has one here")
        found = renamed({name: name for name in weight_names(known, where)}, tensors, (EMBEDDING, LM_HEAD), where)
        return StoredHead(known, {**found, D2T: ids}, {D2T: MAP}, embedding=tensors.get(EMBEDDING))


def _token_map(where: Path, target: Target) -> Tensor:
    """The tokens of ``token_map.pt``, all of them where there is none."""
    if not (where / MAP).is_file():
        return torch.arange(target.vocab_size)
    found = load_pickle(where / MAP)
    try:
        ids = found if isinstance(found, Tensor) else torch.tensor(found)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise refused(where, f"has a {MAP} that is no list of tokens", "shapes")
    return ids

"""A draft LM as a plain Llama of transformers: any engine that takes a draft model takes it.

Where its words are some of the target's tokens, the other tokens' rows of the LM head are the mean of the words' rows.
A state gives such a token the mean of the words' logits, which is never the largest: greedy drafts are the same.
Sampled ones nearly so, and exactly where ``suppress_tokens`` of ``generation_config.json`` is heeded, as transformers
does; it is also what the words are told by when the folder is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.files import read_json
from outpace.heads.base import Head, HeadConfig
from outpace.heads.incompatible import IncompatibleHead
from outpace.heads.layouts.base import About, Foreign, Layout, Names
from outpace.heads.layouts.files import Package
from outpace.heads.layouts.reading import (
    decoder_shapes,
    lm_head,
    options_of,
    refused,
    renamed,
    target_facts,
    weight_names,
)
from outpace.heads.layouts.writing import bf16, decoder_config, embedding, whole_rows
from outpace.targets.base import Target

_EMBEDDING, _ROWS, _GENERATION = "model.embed_tokens.weight", "lm_head.weight", "generation_config.json"


class HuggingFace(Layout):
    """A Llama."""

    name: ClassVar[str] = "hf"
    kinds: ClassVar[tuple[str, ...]] = ("draft-lm",)

    def kind_of(self, config: Mapping[str, Any], names: Names) -> str | None:
        plain = config.get("architectures") == ["LlamaForCausalLM"] and config.get("model_type") == "llama"
        return "draft-lm" if plain and "model.norm.weight" in names() else None

    def express(self, head: Head, target: Target, about: About) -> Package:
        config = {"architectures": ["LlamaForCausalLM"], **decoder_config(head.config, target, "llama")}
        tensors = {f"model.{name}": bf16(value) for name, value in head.state_dict().items() if name[:6] != "words."}
        tensors |= {_EMBEDDING: embedding(target), _ROWS: whole_rows(head.words, target)}
        places = head.words.places(target.vocab_size)
        silent = (places < 0).nonzero()[:, 0].tolist()
        generation = {"do_sample": False, **({"suppress_tokens": silent} if silent else {})}
        return Package(config, tensors, json={_GENERATION: generation})

    def understand(self, config: Mapping[str, Any], tensors: dict[str, Tensor], target: Target, where: Path) -> Foreign:
        try:
            shapes = decoder_shapes(config, target, where)
        except IncompatibleHead as error:
            raise IncompatibleHead(f"{error}; a model of its own is used with --draft-model", error.check) from error
        ids = _words(where, target)
        options = {"layers": shapes["layers"], "pruned": False}
        known = HeadConfig(
            kind="draft-lm",
            target=target_facts(target, None),
            aux_hidden_state_layers=(),
            vocabulary=len(ids),
            options=options_of("draft-lm", options, where),
            **shapes,
        )
        called = {name: f"model.{name}" for name in weight_names(known)}
        found = renamed(called, tensors, (_EMBEDDING, _ROWS), where)
        rows = tensors.get(_ROWS, tensors.get(_EMBEDDING) if config.get("tie_word_embeddings") else None)
        if rows is None:
            raise refused(where, f"lacks tensor {_ROWS}", "keys")
        if len(rows) != target.vocab_size:
            raise refused(where, f"has a tensor {_ROWS} of {len(rows)} tokens; this model has {target.vocab_size}")
        return Foreign(known, found | lm_head(rows[ids], ids, target, where), called, tensors.get(_EMBEDDING))


def _words(where: Path, target: Target) -> Tensor:
    """The tokens that it may draft: all that are not suppressed."""
    path = where / _GENERATION
    silent = read_json(path).get("suppress_tokens") if path.is_file() else None
    kept = torch.ones(target.vocab_size, dtype=torch.bool)
    if silent:
        if not isinstance(silent, list) or not all(isinstance(one, int) and 0 <= one < len(kept) for one in silent):
            raise refused(where, f"has suppress_tokens in its {_GENERATION} that are no tokens of this model")
        kept[silent] = False
    return kept.nonzero()[:, 0]

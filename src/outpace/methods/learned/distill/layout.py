"""A draft LM as a plain Llama of transformers, which any engine that takes a draft model can load.

With a reduced vocabulary the other tokens' rows of the LM head are the mean of the draft tokens' rows: such a token's
logit is the mean of the draft tokens' logits and never the largest, so greedy drafts are the same. Sampled ones are
nearly so, and exactly where ``suppress_tokens`` of ``generation_config.json`` is heeded, as transformers does; it also
tells the draft vocabulary when the folder is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.files import read_json
from outpace.heads.base import Head
from outpace.heads.incompatible import IncompatibleHead
from outpace.heads.layouts.base import D2T, ROWS, About, Layout, StoredHead
from outpace.heads.layouts.files import HeadFiles, Package
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
from outpace.heads.layouts.writing import LM_HEAD, bf16, decoder_config, embedding, whole_rows
from outpace.targets.base import Target

_EMBEDDING, _GENERATION = "model.embed_tokens.weight", "generation_config.json"


@layout
class LlamaLayout(Layout):
    """A Llama of transformers, its tokenizer included."""

    name: ClassVar[str] = "hf"
    kind: ClassVar[str] = "draft-lm"

    def kind_of(self, files: HeadFiles) -> str | None:
        plain = files.config.get("architectures") == ["LlamaForCausalLM"] and files.config.get("model_type") == "llama"
        return self.kind if plain and "model.norm.weight" in files.names else None

    def package(self, head: Head, target: Target, about: About) -> Package:
        config = {"architectures": ["LlamaForCausalLM"], **decoder_config(head.config, target, "llama")}
        tensors = {f"model.{name}": bf16(value) for name, value in head.own_weights().items()}
        tensors |= {_EMBEDDING: embedding(target), LM_HEAD: whole_rows(head.draft_vocabulary, target)}
        silent = (head.draft_vocabulary.t2d(target.vocab_size) < 0).nonzero()[:, 0].tolist()
        generation = {"do_sample": False, **({"suppress_tokens": silent} if silent else {})}
        return Package(config, tensors, json={_GENERATION: generation}, also=about.tokenizer)

    def read(self, files: HeadFiles, target: Target) -> StoredHead:
        config, where, tensors = files.config, files.path, files.tensors
        try:
            shapes = decoder_shapes(config, target, where)
        except IncompatibleHead as error:
            raise IncompatibleHead(f"{error}; a model of its own is used with --draft-model", error.check) from error
        ids = _draft_tokens(where, target)
        known = head_config(
            where,
            kind=self.kind,
            target=target_facts(target, None),
            aux_hidden_state_layers=(),
            vocabulary=len(ids),
            options=options_of(self.kind, {"layers": shapes["layers"], "pruned": False}, where),
            **shapes,
        )
        called = {name: f"model.{name}" for name in weight_names(known, where)}
        found = renamed(called, tensors, (_EMBEDDING, LM_HEAD), where)
        rows = tensors.get(LM_HEAD, tensors.get(_EMBEDDING) if config.get("tie_word_embeddings") else None)
        if rows is None:
            raise refused(where, f"lacks tensor {LM_HEAD}", "keys")
        if len(rows) != target.vocab_size:
            raise refused(where, f"has a tensor {LM_HEAD} of {len(rows)} tokens; this model has {target.vocab_size}")
        found |= {D2T: ids, ROWS: rows[ids]}
        return StoredHead(known, found, {**called, ROWS: LM_HEAD}, embedding=tensors.get(_EMBEDDING))


def _draft_tokens(where: Path, target: Target) -> Tensor:
    """The tokens that it may draft: all that are not suppressed."""
    path = where / _GENERATION
    silent = read_json(path).get("suppress_tokens") if path.is_file() else None
    kept = torch.ones(target.vocab_size, dtype=torch.bool)
    if silent:
        if not isinstance(silent, list) or not all(isinstance(one, int) and 0 <= one < len(kept) for one in silent):
            raise refused(where, f"has suppress_tokens in its {_GENERATION} that are no tokens of this model")
        kept[silent] = False
    return kept.nonzero()[:, 0]

"""Medusa's own layout (FasterDecoding): ``medusa_lm_head.safetensors`` or ``.pt``, and a count of heads and layers.

Head K's L-th block is ``K.L.linear``, and behind the last one stands an LM head of its own, ``K.{layers}.weight``.
Heads of outpace share one, which is written once for each. vLLM reads these names; the checkpoints that were converted
for it call the same tensors ``blocks.K.layers.L`` and ``lm_heads.K``, and they are read as well. ``token_map`` (with
``truncated_vocab_size``), the tokens of a reduced vocabulary, is theirs too. ``medusa_choices`` is the tree that fits
the measured accuracies, as paths of ranks, the form that Medusa and TensorRT-LLM take.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from outpace.heads.base import Head
from outpace.heads.draft_vocabulary import map_problem
from outpace.heads.head_config import shapes
from outpace.heads.layouts.base import D2T, ROWS, About, Layout, StoredHead
from outpace.heads.layouts.files import HeadFiles, Package
from outpace.heads.layouts.reading import (
    head_config,
    number,
    options_of,
    refused,
    renamed,
    same_size,
    target_facts,
    weight_names,
)
from outpace.heads.layouts.registry import layout
from outpace.heads.layouts.writing import bf16, whole_rows
from outpace.heads.typical_tree import typical_tree
from outpace.targets.base import Target

_MAP = "token_map"
_CHOICES = 63
"""Paths of the tree that the layout names, as Medusa's own trees have about."""
_PREFIXES = ("medusa_head.", "medusa_heads.")
_FROM_VLLM = (
    (re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$"), r"\1.\2.linear.\3"),
    (re.compile(r"^lm_heads\.(\d+)\.weight$"), r"\1.{layers}.weight"),
)


@layout
class MedusaLayout(Layout):
    """Medusa's layout."""

    name: ClassVar[str] = "medusa"
    kind: ClassVar[str] = "medusa"

    def kind_of(self, files: HeadFiles) -> str | None:
        ours = "medusa_num_heads" in files.config or files.config.get("model_type") == "medusa"
        return self.kind if ours else None

    def package(self, head: Head, target: Target, about: About) -> Package:
        options, rows = head.options, whole_rows(head.draft_vocabulary, target)
        tensors = {_theirs(name): bf16(value) for name, value in head.own_weights().items()}
        tensors |= {f"{index}.{options.layers}.weight": rows.clone() for index in range(options.heads)}
        config = {
            "model_type": "medusa",
            "medusa_num_heads": options.heads,
            "medusa_num_layers": options.layers,
            "base_model_name_or_path": about.name,
            "hidden_size": head.config.hidden_size,
            "vocab_size": target.vocab_size,
            "torch_dtype": "bfloat16",
            # As vLLM reads it: without the first it leaves out the biases, and only one LM head may be of few tokens.
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }
        if head.config.rank_accuracies:
            config["medusa_choices"] = typical_tree(head.config.rank_accuracies, _CHOICES)
        if len(head.draft_vocabulary) < target.vocab_size:
            tensors[_MAP] = head.draft_vocabulary.d2t.cpu()
            config["truncated_vocab_size"] = len(head.draft_vocabulary)
        return Package(config, tensors, "medusa_lm_head.safetensors")

    def read(self, files: HeadFiles, target: Target) -> StoredHead:
        config, where = files.config, files.path
        same_size("hidden size", config.get("hidden_size", target.hidden_size), target.hidden_size, where)
        same_size("vocabulary", config.get("vocab_size", target.vocab_size), target.vocab_size, where)
        heads = number(config, "medusa_num_heads", where, config.get("num_heads"))
        layers = number(config, "medusa_num_layers", where, config.get("num_hidden_layers", 1))
        tensors = _plain(files.tensors, layers)
        ids = tensors.get(_MAP, torch.arange(target.vocab_size))
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise refused(where, f"has a {_MAP} that is no list of tokens", "shapes")
        known = head_config(
            where,
            kind=self.kind,
            target=target_facts(target, config.get("base_model_name_or_path")),
            aux_hidden_state_layers=(target.num_layers,),
            vocabulary=ids.numel(),
            layers=layers,
            options=options_of(self.kind, {"heads": heads, "layers": layers}, where),
            **shapes(target.hidden_size, "base"),
        )
        called = {name: _theirs(name) for name in weight_names(known, where)}
        rows = [f"{index}.{layers}.weight" for index in range(heads)]
        found = {**renamed(called, tensors, (_MAP, *rows), where), D2T: ids}
        for name in called:  # a block may have no bias
            if name.endswith(".bias") and called[name.removesuffix("bias") + "weight"] in tensors:
                found.setdefault(name, torch.zeros(target.hidden_size))
        shared = _shared(tensors, rows, ids, where)
        if shared is not None:
            found[ROWS] = shared
        return StoredHead(known, found, {**called, D2T: _MAP, ROWS: rows[0]}, lm_head=shared)


def _plain(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """By Medusa's own names, whoever converted them."""
    found = {}
    for name, value in tensors.items():
        plain = name
        for prefix in _PREFIXES:
            plain = plain.removeprefix(prefix)
        for pattern, instead in _FROM_VLLM:
            plain = pattern.sub(instead.replace("{layers}", str(layers)), plain)
        found[plain] = value
    return found


def _theirs(name: str) -> str:
    _, head, layer, part = name.split(".")
    return f"{head}.{layer}.linear.{part}"


def _shared(tensors: Mapping[str, Tensor], rows: list[str], ids: Tensor, where: Path) -> Tensor | None:
    """The LM head of all heads over the draft vocabulary; None where the file has none and the target's is meant."""
    have = [name for name in rows if name in tensors]
    if not have:
        return None
    first = tensors[have[0]]
    if len(have) != len(rows) or any(not torch.equal(tensors[name], first) for name in have[1:]):
        raise refused(where, "has an LM head of its own in each head, which is not read: here they share one")
    whole = len(first) > ids.numel() > 0 and map_problem(ids, len(first)) is None
    return first[ids] if whole else first

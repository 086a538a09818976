"""Medusa's own layout (FasterDecoding): ``medusa_lm_head.safetensors`` or ``.pt``, and a count of heads and layers.

Head K's L-th block is ``K.L.linear``, and behind the last one stands an LM head of its own, ``K.{layers}.weight``.
Heads of outpace share one, which is written once for each. vLLM's converted checkpoints call the same tensors
``blocks.K.layers.L`` and ``lm_heads.K``; they are read as well. ``token_map`` (with ``truncated_vocab_size``) is
theirs: the tokens that a reduced vocabulary holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.heads.base import Head, HeadConfig, shapes
from outpace.heads.layouts.base import About, Foreign, Layout, Names
from outpace.heads.layouts.files import Package
from outpace.heads.layouts.reading import (
    check_ids,
    lm_head,
    number,
    options_of,
    refused,
    renamed,
    same_size,
    target_facts,
    weight_names,
)
from outpace.heads.layouts.writing import bf16, whole_rows
from outpace.targets.base import Target

_KIN = 0.5
"""Cosine of LM heads below which they are not of one model."""
_PREFIXES = ("medusa_head.", "medusa_heads.")
_FROM_VLLM = (
    (re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$"), r"\1.\2.linear.\3"),
    (re.compile(r"^lm_heads\.(\d+)\.weight$"), r"\1.{layers}.weight"),
)


class MedusaLayout(Layout):
    """Medusa's layout."""

    name: ClassVar[str] = "medusa"
    kinds: ClassVar[tuple[str, ...]] = ("medusa",)

    def kind_of(self, config: Mapping[str, Any], names: Names) -> str | None:
        return "medusa" if "medusa_num_heads" in config or config.get("model_type") == "medusa" else None

    def express(self, head: Head, target: Target, about: About) -> Package:
        options, rows = head.options, whole_rows(head.words, target)
        tensors = {_theirs(name): bf16(value) for name, value in head.state_dict().items() if name[:7] == "blocks."}
        tensors |= {f"{index}.{options.layers}.weight": rows.clone() for index in range(options.heads)}
        config = {
            "model_type": "medusa",
            "medusa_num_heads": options.heads,
            "medusa_num_layers": options.layers,
            "base_model_name_or_path": about.name,
            "hidden_size": head.config.hidden_size,
            "vocab_size": target.vocab_size,
            "torch_dtype": "bfloat16",
        }
        if len(head.words) < target.vocab_size:
            tensors["token_map"] = head.words.ids.cpu().long()
            config["truncated_vocab_size"] = len(head.words)
        return Package(config, tensors, "medusa_lm_head.safetensors")

    def understand(self, config: Mapping[str, Any], tensors: dict[str, Tensor], target: Target, where: Path) -> Foreign:
        same_size("hidden size", config.get("hidden_size", target.hidden_size), target.hidden_size, where)
        same_size("vocabulary", config.get("vocab_size", target.vocab_size), target.vocab_size, where)
        heads = number(config, "medusa_num_heads", where, config.get("num_heads"))
        layers = number(config, "medusa_num_layers", where, config.get("num_hidden_layers", 1))
        tensors = _plain(tensors, layers)
        ids = _words(tensors, target, where)
        known = HeadConfig(
            kind="medusa",
            target=target_facts(target, config.get("base_model_name_or_path")),
            aux_hidden_state_layers=(target.num_layers,),
            vocabulary=len(ids),
            layers=layers,
            options=options_of("medusa", {"heads": heads, "layers": layers}, where),
            **shapes(target.hidden_size, "base"),
        )
        called = {name: _theirs(name) for name in weight_names(known)}
        rows = [f"{index}.{layers}.weight" for index in range(heads)]
        found = renamed(called, tensors, ("token_map", *rows), where)
        for name in set(called) - set(found):  # blocks without biases
            if name.endswith(".bias") and called[name.removesuffix("bias") + "weight"] in tensors:
                found[name] = torch.zeros(target.hidden_size)
        shared = _shared(tensors, rows, ids, where)
        _check_rows(shared, ids, target, where)
        return Foreign(known, found | lm_head(shared, ids, target, where, rows[0]), called)


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


def _words(tensors: Mapping[str, Tensor], target: Target, where: Path) -> Tensor:
    if "token_map" not in tensors:
        return torch.arange(target.vocab_size)
    return check_ids(tensors["token_map"], target, where, "token_map")


def _shared(tensors: Mapping[str, Tensor], rows: list[str], ids: Tensor, where: Path) -> Tensor | None:
    """The LM head of all heads, for the words; None where the file has none and the target's is meant."""
    have = [name for name in rows if name in tensors]
    if not have:
        return None
    first = tensors[have[0]]
    if len(have) != len(rows) or any(not torch.equal(tensors[name], first) for name in have[1:]):
        raise refused(where, "has an LM head of its own in each head, which is not read: here they share one")
    if len(first) > len(ids):
        if int(ids.max()) >= len(first):
            raise refused(where, f"has a tensor {have[0]} of {len(first)} tokens, fewer than its token_map names")
        first = first[ids]
    return first


def _check_rows(rows: Tensor | None, ids: Tensor, target: Target, where: Path) -> None:
    """Raise BadInput for another model's LM head: its rows are all that tells, and training moves them little."""
    if rows is None or rows.shape != (len(ids), target.hidden_size):
        return
    theirs, ours = rows.float(), target.lm_head_rows(ids).cpu()
    cosine = float((theirs * ours).sum() / (theirs.norm() * ours.norm()).clamp_min(1e-12))
    if not cosine >= _KIN:
        said = f"was made for other weights than this model's: its LM head and the model's have cosine {cosine:.3f}"
        raise refused(where, said, "fingerprint")

"""Heads on disk: a folder with ``config.json`` and ``model.safetensors``, complete or not there.

What a head borrows from its target (embedding, LM-head rows) is not stored: the target is told from another by its
fingerprint, and lends them when the head is loaded. ``training.json`` says where the weights come from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.errors import BadInput
from outpace.heads.base import Head, HeadConfig, TargetFacts, find_kind
from outpace.heads.fingerprint import check, probe
from outpace.heads.words import Words
from outpace.targets.base import Target

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "training.json"


def facts(target: Target, name: str) -> TargetFacts:
    """What a new head remembers of its target."""
    return TargetFacts(
        name=name,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        fingerprint=probe(target),
    )


def new_head(config: HeadConfig, target: Target, ids: Tensor, seed: int = 0) -> Head:
    """A head that has learned nothing. ``ids`` (Vd,): the tokens that it may draft."""
    torch.manual_seed(seed)
    words = Words(ids, target.head_rows(ids).float().cpu(), rank=config.rank)
    return find_kind(config.kind)(config, words)


def save(head: Head, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write a head: bf16 weights, its configuration, and where it comes from. Weights last: with them it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    borrowed = {"words.rows"} if not head.words.own else set()
    tensors = {
        name: (value.bfloat16() if value.is_floating_point() else value.to(torch.int32)).contiguous().cpu()
        for name, value in head.state_dict().items()
        if name not in borrowed
    }
    _replace(folder / CONFIG, json.dumps(head.config.model_dump(), indent=1).encode())
    _replace(folder / PROVENANCE, json.dumps(dict(provenance), indent=1).encode())
    unfinished = folder / (WEIGHTS + ".unfinished")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, folder / WEIGHTS)


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def read_config(folder: Path) -> HeadConfig:
    """A head's configuration. Raises BadInput for a folder that holds no head, and says what it holds instead."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise BadInput(f"there is no head at '{folder}': no such folder")
    if not path.exists():
        raise BadInput(f"there is no head at '{folder}': it has no {CONFIG}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or "kind" not in found:
        raise BadInput(f"{path} is not the configuration of an outpace head; other layouts are read by: outpace import-head")
    try:
        return HeadConfig.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"{path}, {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """A head's tensors. Raises BadInput for a file that is missing or damaged."""
    path = folder / WEIGHTS
    if not path.exists():
        raise BadInput(f"there is no head at '{folder}': it has no {WEIGHTS}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is damaged or cut short ({error})") from error


def load(folder: Path, target: Target) -> Head:
    """A head for this target. Raises BadInput, in one line, for one that is damaged or was made for another."""
    config = read_config(folder)
    theirs = config.target
    check(
        target,
        theirs.hidden_size,
        theirs.vocab_size,
        theirs.num_layers,
        theirs.fingerprint,
        f"the head at '{folder}' (for {theirs.name})",
    )
    return assembled(config, read_weights(folder), target, folder)


def assembled(config: HeadConfig, tensors: dict[str, Tensor], target: Target, where: Path) -> Head:
    """The network around its weights. Raises BadInput that names the first tensor that does not fit."""
    ids = tensors.get("words.ids")
    if ids is None or ids.dim() != 1 or len(ids) != config.vocabulary:
        raise BadInput(f"the head at '{where}' lacks a vocabulary map of {config.vocabulary} tokens (words.ids)")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
        raise BadInput(f"the head at '{where}' maps to tokens that the model does not have (words.ids)")
    words = Words(ids, target.head_rows(ids.long()).float().cpu(), rank=config.rank, own="words.rows" in tensors)
    head = find_kind(config.kind)(config, words)
    expected = head.state_dict()
    for name, value in expected.items():
        if name == "words.rows" and not words.own:
            continue
        if name not in tensors:
            raise BadInput(f"the head at '{where}' lacks tensor {name}")
        if tensors[name].shape != value.shape:
            raise BadInput(
                f"the head at '{where}': tensor {name} has shape {tuple(tensors[name].shape)}, "
                f"its configuration says {tuple(value.shape)}"
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise BadInput(f"the head at '{where}' has a tensor that its kind does not know: {unknown[0]}")
    missing = head.load_state_dict({name: value.to(expected[name].dtype) for name, value in tensors.items()}, strict=False)
    assert not missing.unexpected_keys
    return head.eval().requires_grad_(False)

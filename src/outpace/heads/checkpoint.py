"""Heads on disk: a folder with ``config.json`` and ``model.safetensors``, complete or not there.

What a head borrows from its target (embedding, LM-head rows) is not stored: the target is told from another by its
fingerprint, and lends them when the head is loaded. ``training.json`` says where the weights come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.files import appearing, read_json, write_atomically
from outpace.core.validation import validated
from outpace.heads.base import Head, HeadConfig, TargetFacts, find_kind
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.fingerprint import check, probe
from outpace.heads.incompatible import IncompatibleHead
from outpace.targets.base import Target

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "training.json"
FORMAT = 1


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
    words = DraftVocabulary(ids, target.head_rows(ids).float().cpu(), rank=config.rank)
    return find_kind(config.kind)(config, words)


def save(head: Head, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write a head: bf16 weights, its configuration, and where it comes from. Weights last: with them it is complete.

    Raises BadInput where there is no room, or no permission; what was there before is then as it was, or gone.
    """
    borrowed = {"words.rows"} if not head.words.own else set()
    tensors = {
        name: (value.bfloat16() if value.is_floating_point() else value.to(torch.int32)).contiguous().cpu()
        for name, value in head.state_dict().items()
        if name not in borrowed
    }
    config = json.dumps(head.config.model_dump(), indent=1).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with appearing(folder / WEIGHTS) as unfinished:
            save_file(tensors, unfinished, metadata={"format": "pt"})
            if (folder / CONFIG).exists() and (folder / CONFIG).read_bytes() != config:
                (folder / WEIGHTS).unlink(missing_ok=True)  # of another head: never its weights under this one's name
            write_atomically(folder / CONFIG, config)
            write_atomically(folder / PROVENANCE, json.dumps(dict(provenance), indent=1).encode())
    except (OSError, SafetensorError) as error:
        raise BadInput(f"the head cannot be written to '{folder}': {error}") from error


def is_ours(folder: Path) -> bool:
    """Whether a folder's configuration is one of outpace's own; False where it has none that can be read."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "kind" in found and bool({"aux_hidden_state_layers", "taps"} & set(found))


def read_config(folder: Path) -> HeadConfig:
    """A head's configuration. Raises BadInput for a folder that holds no head of ours, and says what is wrong."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise BadInput(f"there is no head at '{folder}': no such folder")
    if not path.exists():
        raise BadInput(f"there is no head at '{folder}': it has no {CONFIG}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or "kind" not in found:
        raise BadInput(f"{path} is not the configuration of a head, of outpace or of a layout that is read")
    config = validated(HeadConfig, found, lambda key, reason: BadInput(f"{path}, {key}: {reason}"))
    if config.format != FORMAT:
        raise BadInput(f"{path} is of format {config.format}, and this outpace reads format {FORMAT}; update it")
    return config


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """Where a head comes from and what was measured of it; None where its folder does not say.

    Raises BadInput for a file that is damaged.
    """
    path = folder / PROVENANCE
    return read_json(path) if path.is_file() else None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """A head's tensors. Raises BadInput for a file that is missing or damaged."""
    path = folder / WEIGHTS
    if not path.exists():
        raise IncompatibleHead(f"there is no head at '{folder}': it has no {WEIGHTS}", "weights")
    try:
        found: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise IncompatibleHead(f"{path} is damaged or cut short ({error})", "weights") from error
    return found


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


def assembled(
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    target: Target,
    where: Path,
    called: Mapping[str, str] | None = None,
) -> Head:
    """The network around its weights. ``called``: what its file calls a tensor, where that is something else.

    Raises BadInput that names the first tensor that does not fit.
    """
    names = called or {}
    head = network(config, tensors, target, where)
    expected = expected_shapes(head)
    for name, shape in expected.items():
        if name not in tensors:
            raise IncompatibleHead(f"the head at '{where}' lacks tensor {names.get(name, name)}", "keys")
        if tuple(tensors[name].shape) != shape:
            raise IncompatibleHead(
                f"the head at '{where}': tensor {names.get(name, name)} has shape {tuple(tensors[name].shape)}, "
                f"its configuration says {shape}",
                "shapes",
            )
        if not bool(tensors[name].isfinite().all()):
            raise IncompatibleHead(
                f"the head at '{where}': tensor {names.get(name, name)} holds numbers that are not finite", "numbers"
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise IncompatibleHead(f"the head at '{where}' has a tensor that its kind does not know: {unknown[0]}", "keys")
    kinds = {name: value.dtype for name, value in head.state_dict().items()}
    head.load_state_dict({name: value.to(kinds[name]) for name, value in tensors.items()}, strict=False)
    return head.eval().requires_grad_(False)


def network(config: HeadConfig, tensors: Mapping[str, Tensor], target: Target, where: Path) -> Head:
    """The network that a configuration describes, its words in place and nothing else yet."""
    ids = tensors.get("words.ids")
    if ids is None or ids.dim() != 1 or len(ids) != config.vocabulary or not len(ids) or ids.is_floating_point():
        raise IncompatibleHead(
            f"the head at '{where}' lacks a vocabulary map of {config.vocabulary} tokens (words.ids)", "vocabulary"
        )
    ids = ids.long()
    if not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
        raise IncompatibleHead(
            f"the head at '{where}' maps to tokens that the model does not have (words.ids)", "vocabulary"
        )
    if not distinct(ids):
        raise IncompatibleHead(
            f"the head at '{where}' maps two of its tokens to one of the model's (words.ids)", "vocabulary"
        )
    outside = next((tap for tap in config.aux_hidden_state_layers if not 0 <= tap <= target.num_layers), None)
    if outside is not None:
        raise IncompatibleHead(
            f"the head at '{where}' reads tap {outside}; this model has {target.num_layers} layers", "layers"
        )
    try:
        words = DraftVocabulary(ids, target.head_rows(ids).float().cpu(), rank=config.rank, own="words.rows" in tensors)
        return find_kind(config.kind)(config, words)
    except (ValueError, RuntimeError, ArithmeticError, AssertionError) as error:  # pydantic's errors are ValueErrors
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise IncompatibleHead(
            f"the head at '{where}': its {CONFIG} describes no {config.kind} head ({first})", "configuration"
        ) from error


def distinct(ids: Tensor) -> bool:
    """Whether no id is there twice."""
    return len(set(ids.tolist())) == len(ids)


def expected_shapes(head: Head) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that a head's file must hold."""
    return {
        name: tuple(value.shape) for name, value in head.state_dict().items() if name != "words.rows" or head.words.own
    }

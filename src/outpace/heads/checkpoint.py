"""Heads on disk: a folder with ``config.json`` and ``model.safetensors``, complete or not there.

What a head borrows from its target (embedding, LM-head rows) is not stored: the target is recognised by its
fingerprint and lends them when the head is loaded (:mod:`outpace.heads.head_folder`). ``training.json`` says where the
weights come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.files import atomic_file, read_json, write_atomically
from outpace.heads.base import Head
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.fingerprint import probe
from outpace.heads.head_config import CONFIG, PROVENANCE, WEIGHTS, HeadConfig, TargetFacts
from outpace.heads.kinds import find_kind
from outpace.targets.base import Target


def facts(target: Target, name: str) -> TargetFacts:
    """What a head's configuration says of its target; runs the target once, for its fingerprint."""
    return TargetFacts(
        name=name,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        fingerprint=probe(target),
    )


def new_head(config: HeadConfig, target: Target, d2t: Tensor, seed: int = 0, *, own: bool = False) -> Head:
    """An untrained head. ``d2t`` (Vd,): the target's ids of the tokens that it may draft; ``own``: the LM head is its
    own, and begins as the target's."""
    torch.manual_seed(seed)
    vocabulary = DraftVocabulary(d2t, target.lm_head_rows(d2t).float().cpu(), rank=config.rank, own=own)
    return find_kind(config.kind)(config, vocabulary)


def save(head: Head, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write a head: bf16 weights, its configuration, and where it comes from. Weights last: with them it is complete.

    Raises BadInput where there is no room, or no permission; what was there before is then as it was, or gone.
    """
    tensors = {
        name: (value.bfloat16() if value.is_floating_point() else value.to(torch.int32)).contiguous().cpu()
        for name, value in head.state_dict().items()
    }
    config = json.dumps(head.config.model_dump(), indent=1).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / WEIGHTS) as unfinished:
            save_file(tensors, unfinished, metadata={"format": "pt"})
            if (folder / CONFIG).exists() and (folder / CONFIG).read_bytes() != config:
                (folder / WEIGHTS).unlink(missing_ok=True)  # of another head: never its weights under this one's name
            write_atomically(folder / CONFIG, config)
            write_atomically(folder / PROVENANCE, json.dumps(dict(provenance), indent=1).encode())
    except (OSError, SafetensorError) as error:
        raise BadInput(f"the head cannot be written to '{folder}': {error}") from error


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """Where a head comes from and what was measured of it; None where its folder does not say.

    Raises BadInput for a file that is damaged.
    """
    path = folder / PROVENANCE
    return read_json(path) if path.is_file() else None

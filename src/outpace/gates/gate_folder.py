"""Gates on disk: a folder with ``config.json``, ``model.safetensors`` and ``training.json``, complete or not there.

A gate is for the model that it was trained for, which is told by its fingerprint; a gate that reads a draft model's
rows, or counts its costs, is for that draft model too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outpace.core.errors import BadInput
from outpace.core.files import atomic_folder, read_json
from outpace.core.validation import validated
from outpace.gates.draft_probe import alike as same_draft, draft_probe
from outpace.gates.gate import FORMAT, Gate, GateConfig
from outpace.heads.fingerprint import alike, probe
from outpace.heads.head_config import CONFIG, PROVENANCE, WEIGHTS
from outpace.targets.base import Target


@dataclass(frozen=True, slots=True)
class StoredGate:
    """A gate as it was read. ``gate``: its classifier, None where its kind has none."""

    config: GateConfig
    gate: Gate | None

    def threshold(self, name: str, most: float = 1.0) -> float:
        """What training chose for the setting ``name``, at most ``most``. Raises BadInput where it did not."""
        if name not in self.config.thresholds:
            raise BadInput(f"the gate's {CONFIG} has no threshold '{name}'; train it again (outpace train)")
        found = self.config.thresholds[name]
        if not 0.0 <= found <= most:
            raise BadInput(
                f"the gate's {CONFIG} has {name}={found:g}, which must be between 0 and {most:g}; train it again "
                "(outpace train)"
            )
        return found


def check_new_folder(folder: Path) -> None:
    """Raise BadInput for a folder that holds something, or that cannot be."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is not an empty folder; give --out another one")


def save_gate(config: GateConfig, gate: Gate | None, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write a gate; all of it or nothing. Raises BadInput where there is no room, or no permission."""
    try:
        with atomic_folder(folder) as unfinished:
            (unfinished / CONFIG).write_text(json.dumps(config.model_dump(), indent=1))
            (unfinished / PROVENANCE).write_text(json.dumps(dict(provenance), indent=1))
            if gate is not None:
                weights = {name: value.float().contiguous().cpu() for name, value in gate.state_dict().items()}
                save_file(weights, unfinished / WEIGHTS, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise BadInput(f"the gate cannot be written to '{folder}': {error}") from error


def open_gate(folder: Path, kind: str, features: int, target: Target, draft: Target | None) -> StoredGate:
    """The gate in a folder, for these models. ``features``: how many its kind reads; 0: it has no classifier.

    Raises BadInput for a folder that holds no gate of the kind, and for a gate of another target or draft model.
    """
    if not (folder / CONFIG).is_file():
        raise BadInput(f"there is no gate at '{folder}'; train one: outpace train {kind} --out {folder}")
    path = folder / CONFIG
    found = read_json(path)
    if found.get("gate") != kind:
        what = f"a gate of '{found['gate']}'" if isinstance(found.get("gate"), str) else "no gate"
        raise BadInput(f"'{folder}' holds {what}, not one of '{kind}'")
    config = validated(GateConfig, found, lambda key, reason: BadInput(f"{path}, {key}: {reason}"))
    if config.format != FORMAT:
        raise BadInput(f"{path} is of format {config.format}, and this outpace reads format {FORMAT}; update it")
    _check_target(folder, config, target)
    if draft is not None and config.draft is not None and not same_draft(config.draft.fingerprint, draft_probe(draft)):
        raise BadInput(
            f"the gate at '{folder}' was trained for {config.draft.name}, and this is another draft model; give that "
            "one with --draft-model, or train a gate for this one"
        )
    if config.features != features:
        raise BadInput(f"the gate at '{folder}' reads {config.features} features, and '{kind}' has {features} here")
    return StoredGate(config, _classifier(folder, config) if features else None)


def _check_target(folder: Path, config: GateConfig, target: Target) -> None:
    facts = config.target
    theirs = (facts.hidden_size, facts.vocab_size, facts.num_layers)
    ours = (target.hidden_size, target.vocab_size, target.num_layers)
    if theirs != ours or not alike(facts.fingerprint, probe(target)):
        raise BadInput(
            f"the gate at '{folder}' was trained for other weights than this model's ({facts.name}); train one for "
            f"this model: outpace train {config.gate} --model MODEL --out FOLDER"
        )


def _classifier(folder: Path, config: GateConfig) -> Gate:
    gate = Gate(config.features, config.hidden)
    expected = {name: tuple(value.shape) for name, value in gate.state_dict().items()}
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"the gate's weights cannot be read: {folder / WEIGHTS}: {error}") from error
    if {name: tuple(value.shape) for name, value in weights.items()} != expected:
        raise BadInput(f"{folder / WEIGHTS} does not hold the tensors that {CONFIG} describes")
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        raise BadInput(f"{folder / WEIGHTS} holds numbers that are not finite")
    gate.load_state_dict({name: value.float() for name, value in weights.items()})
    return gate.eval().requires_grad_(False)

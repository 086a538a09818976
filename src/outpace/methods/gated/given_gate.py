"""The gate that a method was given: a folder that ``outpace train`` wrote, or random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import JsonValue

from outpace.core.errors import BadInput
from outpace.core.files import home_expanded

if TYPE_CHECKING:
    from outpace.gates.gate import Gate
    from outpace.gates.gate_folder import StoredGate
    from outpace.targets.base import Target

FILE: dict[str, JsonValue] = {"file": True}
"""Marks a setting that names a file: requests to a server do not choose it (:mod:`outpace.serving.offered`)."""
RANDOM = "random"
"""In place of a folder: an untrained gate. It certifies what is around the gate, and decodes nothing useful."""
GATE_SETTING = f"folder of a trained gate (outpace train); '{RANDOM}': untrained weights, for certification"


def stored_gate(kind: str, folder: str, features: int, target: Target, draft: Target | None) -> StoredGate:
    """The gate in ``folder``, checked. Raises BadInput where none was named, and for one of other models."""
    from outpace.gates.gate_folder import open_gate

    if not folder:
        raise BadInput(
            f"method '{kind}' needs a gate: train one with 'outpace train {kind} --model MODEL --out FOLDER', and give "
            f"--param {kind}.gate=FOLDER"
        )
    return open_gate(home_expanded(folder), kind, features, target, draft)


def classifier(
    kind: str, folder: str, features: int, threshold: float | None, target: Target, draft: Target | None
) -> tuple[Gate, float]:
    """The gate's classifier, and the threshold: the one that was given, or the one that its training chose."""
    from outpace.gates.gate import random_gate

    if folder == RANDOM:
        return random_gate(features), 0.5 if threshold is None else threshold
    found = stored_gate(kind, folder, features, target, draft)
    assert found.gate is not None
    return found.gate, found.threshold("threshold") if threshold is None else threshold

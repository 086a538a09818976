"""The state of a training run on disk, ``trainer.pt`` beside the head: what a resumed run goes on from.

``spent.json`` holds the time that was spent before there is such a state, on data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from outpace.core.errors import BadInput
from outpace.core.files import atomic_file, read_json, write_atomically
from outpace.heads.head_config import HeadConfig
from outpace.models.quiet import one_line

STATE, SPENT = "trainer.pt", "spent.json"
_NEEDED = {"head", "best", "optimisers", "progress", "config"}


def settings_of(config: HeadConfig) -> dict[str, Any]:
    """What must be the same when a run goes on; the target's fingerprint is checked elsewhere, up to rounding."""
    return config.model_dump(exclude={"target"})


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a run's state, whole or not at all. Raises BadInput where it cannot be written."""
    try:
        with atomic_file(folder / STATE) as unfinished:
            torch.save(state, unfinished)
        (folder / SPENT).unlink(missing_ok=True)  # the state holds it
    except (OSError, RuntimeError) as error:
        raise BadInput(
            f"{folder / STATE} cannot be written ({error}); the earlier state is kept: free some space, and "
            "continue with --resume"
        ) from error


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state of the run in a folder; None where there is none. Raises BadInput for one that is damaged."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        missing = _NEEDED - set(state)
    except Exception as error:
        raise BadInput(f"{path} is damaged ({one_line(error)}); delete it to start over") from error
    if missing:
        raise BadInput(f"{path} is damaged (it lacks {', '.join(sorted(missing))}); delete it to start over")
    return state


def check_same_run(folder: Path, *, seed: int, began: str) -> None:
    """Raise BadInput for a ``seed``, or weights to begin with, that are not those of the run in the folder.

    ``began``: the fingerprint of a trained head's weights; "": new ones.
    """
    before = (read_state(folder) or {}).get("length", {})
    earlier = before.get("seed", seed)
    if earlier != seed:
        raise BadInput(
            f"{folder} holds a run with --seed {earlier}, which orders its batches, not {seed}; give the same seed, "
            "or another --out"
        )
    if before.get("began", began) != began:
        how = "from another head" if before["began"] else "with new weights"
        raise BadInput(f"{folder} holds a run that began {how}; give the same --from, or another --out")


def write_seconds_spent(folder: Path, seconds: float) -> None:
    """Note what has been spent on the head in a folder before there is a state of its training."""
    try:
        write_atomically(folder / SPENT, json.dumps({"seconds": round(seconds, 1)}).encode())
    except OSError as error:
        where = folder / SPENT
        raise BadInput(f"{where} cannot be written ({error}); free some space, and continue with --resume") from error


def seconds_spent(folder: Path) -> float:
    """What earlier runs have spent on the head in a folder, data and training together; 0 where there is none."""
    progress = (read_state(folder) or {"progress": {}})["progress"]
    trained = float(progress.get("seconds", 0.0)) + float(progress.get("other_seconds", 0.0))
    path = folder / SPENT
    if not path.exists():
        return trained
    noted = read_json(path).get("seconds")
    if not isinstance(noted, int | float) or not 0.0 <= noted < float("inf"):
        raise BadInput(f"{path} is damaged; delete it, and the time of earlier runs is counted from the training alone")
    return max(trained, float(noted))

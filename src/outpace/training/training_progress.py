"""TrainingProgress: what a training reports while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where a training is.

    ``stage``: "data" (prompts are answered), "plan" (what is expected within the minutes that were given), "collected",
    "training", "evaluation", or "stopped" after Ctrl-C. ``done`` of ``total`` are counted in ``unit``: tokens of
    answers, steps of training (the total is an estimate), or nothing. ``doing``: more of it, in words; of "stopped",
    the folder that keeps what was done.
    """

    stage: Literal["data", "plan", "collected", "training", "evaluation", "stopped"]
    done: int
    total: int
    doing: str
    unit: Literal["tokens", "steps", ""] = ""


Report = Callable[[TrainingProgress], object]

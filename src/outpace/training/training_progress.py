"""TrainingProgress: what a training says of itself all along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where a training is.

    ``stage``: "data" (``done`` and ``total`` count tokens of answers), "plan" (what is expected within the minutes that
    were given), "collected", "training" (``done`` of ``total`` is the share of it), "evaluation", or "stopped" after
    Ctrl-C. ``doing``: more of it, in words.
    """

    stage: Literal["data", "plan", "collected", "training", "evaluation", "stopped"]
    done: int
    total: int
    doing: str


Report = Callable[[TrainingProgress], object]

"""Schedule: how long and how fast to train. Progress: how far a run has come."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outpace.core.errors import BadInput

VECTOR_RATE = 1e-3
"""Largest learning rate of weights that are no matrices, beside the largest of a kind's matrices."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to train. The learning rate falls towards whatever ends first, data or time.

    ``epochs``: passes over the data, inf for as many as there is time for; ``seconds``: of training, over all runs;
    ``matrix_rate``, ``vector_rate``: largest learning rates, the first None for that of the kind of head;
    ``save_every``, ``evaluate_every``: seconds. Raises BadInput where there is no time or no data.
    """

    epochs: float = 1.0
    seconds: float = math.inf
    matrix_rate: float | None = None
    vector_rate: float = VECTOR_RATE
    save_every: float = 120.0
    evaluate_every: float = 300.0
    patience: int = 3
    """Evaluations without improvement after which training ends."""
    patient_until: float = 0.0
    """Share of the run up to which evaluations do not count for patience: a high learning rate holds the loss up."""
    accumulate: int = 1
    """Batches in a step of the optimiser, their gradients averaged."""
    shard: bool = False
    """Each process keeps the optimiser's state of some weights alone."""
    seed: int = 0
    watched: int = 0
    """Answer tokens of the held-out split on which the loss is watched; 0: all."""
    asked_seconds: float | None = None
    """What the user gave for the whole run, data included; None: ``seconds``."""

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.epochs > 0:
            raise BadInput("training needs some time and some data: minutes and epochs must be above 0")

    def length(self, answers: int) -> dict[str, float]:
        """What decides when a run ends; ``answers``: tokens of answers in a pass."""
        seconds = self.seconds if self.asked_seconds is None else self.asked_seconds
        return {"epochs": self.epochs, "seconds": seconds, "answers": answers, "watched": self.watched}


@dataclass(slots=True)
class Progress:
    """Where a run is. ``seconds``: spent in training, over all runs; ``history``: (step, held-out loss).

    ``batch``: the next one of ``epoch``; ``tokens``: of answers, so far; ``skipped``: steps without a finite loss;
    ``figures``: running means of the losses. ``best``: the lowest held-out loss, that of the weights that are kept;
    ``lowest``: the lowest since the run was resumed, and ``worse``: evaluations since, for patience: a learning rate
    that rises again raises the loss at first. ``other_seconds``: spent on data and on measuring, over all runs.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    other_seconds: float = 0.0
    tokens: int = 0
    best: float = math.inf
    lowest: float = math.inf
    worse: int = 0
    skipped: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

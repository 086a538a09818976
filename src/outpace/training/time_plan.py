"""TimePlan: one bound on the time of data and training together, and how much of both fits into it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

DATA_SHARE = 0.5
"""Of the time, for data at most; the rest is for training, in as many passes as it has time for."""


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """``tokens_per_second`` of answers that are trained on, and ``tokens_per_step``."""

    tokens_per_second: float
    tokens_per_step: float


class TimePlan:
    """A bound of ``seconds`` by ``clock`` (seconds), of which earlier runs have ``spent`` some; inf: no bound."""

    def __init__(
        self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic, spent: float = 0.0
    ) -> None:
        self.seconds, self.clock = seconds, clock
        self.began = clock() - spent
        self._data_ends = self.began + DATA_SHARE * seconds

    @property
    def bounded(self) -> bool:
        """Whether there is a bound at all."""
        return math.isfinite(self.seconds)

    @property
    def spent(self) -> float:
        """Seconds since it began, those of earlier runs included."""
        return self.clock() - self.began

    @property
    def left(self) -> float:
        """Seconds that are left; 0 where none are."""
        return max(0.0, self.seconds - self.spent)

    @property
    def data_left(self) -> float:
        """Seconds that are left for data; 0 where none are."""
        return max(0.0, self._data_ends - self.clock())

    def data_over(self) -> bool:
        """Whether the time for data is used up."""
        return self.clock() >= self._data_ends

    def half_of_data_over(self) -> Callable[[], bool]:
        """Tells whether half of the time that is left for data now is used up."""
        ends = self.clock() + 0.5 * self.data_left
        return lambda: self.clock() >= ends

    def divide(self, have: float, answering: float, training: TrainingSpeed) -> None:
        """Give data the time that it needs for one pass to fill the rest, ``DATA_SHARE`` of the whole at most.

        ``have``: tokens of answers that there are; ``answering``: tokens a second of answers that are collected.
        """
        a_pass = have / training.tokens_per_second
        for_data = (self.left - a_pass) / (1.0 + answering / training.tokens_per_second)
        self._data_ends = min(self.began + DATA_SHARE * self.seconds, self.clock() + max(0.0, for_data))

    def prediction(self, have: float, conversations: int, answering: float, training: TrainingSpeed) -> str:
        """What :meth:`divide` expects, in words."""
        tokens = have + self.data_left * answering
        steps = (self.left - self.data_left) * training.tokens_per_second / training.tokens_per_step
        count = conversations * tokens / have
        minutes = _counted(f"{self.seconds / 60:g}", "minute")
        return f"about {_counted(_rounded(count), 'conversation')}, {_counted(_rounded(steps), 'step')} in {minutes}"


def _counted(number: str, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == "1" else "s")


def _rounded(value: float) -> str:
    """To two digits: it is an estimate."""
    if value < 1:
        return "1"
    unit = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return f"{round(value / unit) * unit:,}"

"""What one more level of a draft costs, for drafters that run their network once a level."""

from __future__ import annotations

from outpace.targets.base import Sequence, Target

NOMINAL = 0.05
"""The cost of a level for a sampled request, in autoregressive steps."""


class LevelCost:
    """Costs in autoregressive steps of ``target``: measured for greedy requests, nominal for sampled ones, whose
    answers must not depend on the clock."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._seconds = 0.0

    def measured(self, seconds: float) -> None:
        """One level took so long."""
        # Some levels are interrupted: what is usual counts, not the mean.
        self._seconds = seconds if not self._seconds else min(1.1 * self._seconds, 0.9 * self._seconds + 0.1 * seconds)

    def of(self, sequence: Sequence, batch: int) -> float:
        """The cost of a level for one of ``batch`` requests."""
        if not sequence.params.greedy or not self._seconds:
            return NOMINAL
        return min(1.0, self._seconds / self._target.costs.seconds(batch))

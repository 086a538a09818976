"""What running another level of a draft takes, from which drafters choose how deep to draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from statistics import median

from outpace.controllers.predictor import Predictor
from outpace.targets.base import Target

LEVEL_COST = 0.05
"""The cost of a level where none was measured, in autoregressive steps."""
_SEEN = 3
"""Levels that are timed before their time counts: the first ones of a process are slow."""
_CHEAPER = 0.99
"""What a level's time is multiplied by in drafts that run none: one that seemed too slow would else never be run again,
and so never show anything else."""
_FLOOR = 0.5
"""It falls no lower than to this share of the quickest level: text for which no level is run at any price is common."""


class LevelCost:
    """Costs of a level in autoregressive steps of ``target``.

    Requests go by the time that levels take now, greedy and sampled ones apart. Those whose answers must not depend on
    the clock go by what ``rehearse`` gave when it was first called on this machine, kept with the target's costs under
    ``name``.
    """

    def __init__(self, target: Target, name: str, rehearse: Callable[[], None]) -> None:
        self._target, self._name, self._rehearse = target, name, rehearse
        self._predictor = Predictor(target.costs)
        self._live = {False: _LevelTime(), True: _LevelTime()}
        """By whether requests sample."""
        self._rehearsing = False

    def measured(self, levels: Seq[float], *, sampled: bool) -> None:
        """A draft has run levels that took so many seconds each, or none."""
        self._live[sampled].saw(levels)

    def of(self, drafting: int, batch: int, context: int, *, live: bool, sampled: bool) -> float:
        """The cost of a level for one of ``drafting`` requests, whose rows it runs together: each bears its share.

        ``batch``: requests that share the round; ``context``: about how many tokens the longest has; ``live``: whether
        the clocks of all of them may be read.
        """
        costs, now = self._target.costs, self._live[sampled]
        if costs.fixed or self._rehearsing or (live and not now.known):
            return LEVEL_COST  # which does not depend on the batch
        steps = self._predictor.draft_steps(
            lambda: now.seconds if live else costs.once(self._name, self._rehearsed),
            LEVEL_COST,
            batch,
            context,
            live=live,
            sampled=sampled,
        )
        return min(1.0, steps) / drafting

    def _rehearsed(self) -> float:
        known, self._live, self._rehearsing = self._live, {False: _LevelTime(), True: _LevelTime()}, True
        try:
            self._rehearse()
            return self._live[True].seconds
        finally:
            self._live, self._rehearsing = known, False


@dataclass(slots=True)
class _LevelTime:
    """What a level usually takes: the median of the first ones, then slowly what the next ones take."""

    seconds: float = 0.0
    least: float = math.inf
    """Of all levels so far."""
    first: list[float] = field(default_factory=list)

    @property
    def known(self) -> bool:
        return len(self.first) == _SEEN

    def saw(self, levels: Seq[float]) -> None:
        """A draft has run such levels."""
        if self.known and not levels:
            self.seconds = max(_CHEAPER * self.seconds, _FLOOR * self.least)
        for one in levels:
            self.least = min(self.least, one)
            if not self.known:
                self.first.append(one)
                self.seconds = median(self.first)
                continue
            # Some levels are interrupted: what is usual counts, not the mean.
            self.seconds = min(1.1 * self.seconds, 0.9 * self.seconds + 0.1 * one)

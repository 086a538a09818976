"""The cost model: as many draft tokens as pay, given what forwards cost here and what has been accepted lately.

Leviathan et al. 2023 (arXiv 2211.17192, section 3.5): with draft tokens accepted at rate a, k of them give
(1 - a^(k+1)) / (1 - a) tokens a round. Here the round's cost is the measured forward over the rows of the whole batch,
so the best k follows from the machine, the precision and the batch, and may be none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.controllers.base import Budget, Controller

if TYPE_CHECKING:
    from outpace.metrics import RequestMetrics
    from outpace.targets.costs import ForwardCosts

_MARGIN = 1.08
"""Drafting must promise this much more than the plain step: the estimates are not exact, and drafts cost a little."""


class CostModel(Controller):
    """Chains of at most ``most`` draft tokens, at greedy requests; ``sampled`` tokens, always, for sampled ones.

    What is drafted never changes a greedy answer. A sampled answer does depend on it, and measured times differ from
    run to run: a fixed length keeps the promise that a seed reproduces its answer.
    """

    def __init__(self, costs: ForwardCosts, sampled: int, most: int = 15) -> None:
        self._costs = costs
        self._sampled = Budget(sampled, nodes=sampled)
        self._most = most
        self._chosen: dict[tuple[int, float], Budget] = {}

    def budget(self, metrics: RequestMetrics, batch: int, sampled: bool = False) -> Budget:
        if sampled:
            return self._sampled
        key = batch, round(metrics.recent_acceptance, 2)
        if key not in self._chosen:  # asked for every request in every round
            self._chosen[key] = self._best(*key)
        return self._chosen[key]

    def _best(self, batch: int, rate: float) -> Budget:
        best, best_pace = 0, _MARGIN / self._costs.seconds(batch)
        expected = 1.0
        for length in range(1, self._most + 1):
            expected += rate**length
            pace = expected / self._costs.seconds(batch * (1 + length))
            if pace > best_pace:
                best, best_pace = length, pace
            elif length > 2 * best + 4:  # past the top: longer chains only cost
                break
        return Budget(best, nodes=best)

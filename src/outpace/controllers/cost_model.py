"""The cost model: what a round costs with n draft tokens on this machine, from which drafters choose how many to draft.

A drafter that estimates how likely its draft tokens are accepted needs no length: it drafts while the expected tokens
of the round grow faster than its cost (Leviathan et al. 2023, arXiv 2211.17192, section 3.5, for chains of one
acceptance rate; Chen et al. 2024, arXiv 2402.12374, for trees). The cost is that of the measured forward over the
rows of the whole batch.
"""

from __future__ import annotations

from outpace.controllers.base import Budget, Controller
from outpace.core.metrics import RequestMetrics
from outpace.targets.costs import ForwardCosts

MARGIN = 1.05
"""Drafting must promise this much more than an autoregressive step: probabilities are not exact, drafts take time."""
NOMINAL, AMPLE, BEYOND = 0.05, 7, 0.2
"""What a draft token costs a sampled request, in autoregressive steps: up to AMPLE of them and after. About what it
does on processors where drafting gains at all; beyond some number of rows each costs in proportion everywhere."""


def nominal(count: int) -> float:
    """The cost of a round with ``count`` draft tokens where nothing may be measured, in autoregressive steps."""
    return MARGIN + NOMINAL * count + (BEYOND - NOMINAL) * max(0, count - AMPLE) if count else 1.0


class CostModel(Controller):
    """Relative costs of up to ``most`` draft tokens, measured for greedy requests, nominal for sampled ones.

    What is drafted never changes a greedy answer. A sampled answer does depend on it, and measured times differ from
    run to run: with nominal costs a seed reproduces its answer.
    """

    def __init__(self, costs: ForwardCosts, most: int = 16, width: int = 1) -> None:
        self._costs = costs
        self._most = most
        self._width = width
        self._measured: dict[int, Budget] = {}
        self._nominal = self._budget([nominal(count) for count in range(1, most + 1)])

    def budget(self, metrics: RequestMetrics, batch: int, sampled: bool = False) -> Budget:
        if sampled:
            return self._nominal
        if batch not in self._measured:  # asked for every request in every round
            plain = self._costs.seconds(batch)
            rows = [batch * (1 + count) for count in range(1, self._most + 1)]
            self._measured[batch] = self._budget([MARGIN * self._costs.seconds(one) / plain for one in rows])
        return self._measured[batch]

    def _budget(self, relative_costs: list[float]) -> Budget:
        return Budget(self._most, self._most, self._width, relative_costs=(1.0, *relative_costs))

"""The cost model: what a round costs with n draft tokens on this machine, from which drafters choose how many to draft.

A drafter that estimates how likely its draft tokens are accepted needs no length: it drafts while the expected tokens
of the round grow faster than its cost (Leviathan et al. 2023, arXiv 2211.17192, section 3.5, for chains of one
acceptance rate; Chen et al. 2024, arXiv 2402.12374, for trees). The cost is that of the forward over the rows of the
whole batch, after as many tokens as the request has. Every request is told what draft tokens cost and bring beside the
others' next tokens; how many of all requests' draft tokens are scored together is then decided by
:mod:`outpace.controllers.row_allocation`.
"""

from __future__ import annotations

from outpace.controllers.base import Budget, Controller
from outpace.controllers.predictor import Predictor
from outpace.core.metrics import RequestMetrics
from outpace.targets.costs import Costs
from outpace.targets.threads import threads

LONGEST = 64
"""Most draft tokens, where rows are free."""
_LIMIT = 16
"""Draft tokens whose costs are always known; twice as many while the last doubling made the round no more than
``_FLAT`` times as long. So rows that nobody will draft are not measured."""
_FLAT = 1.25


class CostModel(Controller):
    """Relative costs of up to ``most`` draft tokens; None: of as many as may be worth it, LONGEST of them at most.

    Requests go by what rounds have come to take in this process. A sampled answer depends on what is drafted: so those
    that must be the same again for their seed go by recorded costs, and are where costs are fixed, and on one machine
    with one table of costs (:mod:`outpace.targets.cost_table`).
    """

    def __init__(self, costs: Costs, most: int | None = None, width: int = 1) -> None:
        self._costs = costs
        self._most = most
        self._width = width
        self._known: dict[tuple[int, int, int, bool, bool], Budget] = {}
        self._version = costs.version

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        context, version = context_of(metrics), self._costs.version
        if self._version != version:
            self._version = version
            self._known.clear()
        known = batch, context, threads(), repeatable, metrics.sampled
        found = self._known.get(known)
        if found is None:  # asked for every request in every round
            found = self._known[known] = self._budget(batch, context, live=not repeatable, sampled=metrics.sampled)
        return found

    def _budget(self, batch: int, context: int, *, live: bool, sampled: bool) -> Budget:
        batch = 1 if self._costs.fixed else batch
        predictor, relative_costs = Predictor(self._costs), [1.0]

        def extend(most: int) -> None:
            counts = range(len(relative_costs), most + 1)
            relative_costs.extend(predictor.relative_costs(counts, batch, context, live=live, sampled=sampled))

        extend(_LIMIT if self._most is None else self._most)
        longest = batch * LONGEST if self._most is None else batch * self._most
        while (most := len(relative_costs) - 1) < longest:
            if most and relative_costs[most] > _FLAT * relative_costs[most // 2]:
                break
            extend(min(max(1, 2 * most), longest))
        most = min(len(relative_costs) - 1, LONGEST if self._most is None else self._most)
        return Budget(most, most, self._width, relative_costs=tuple(relative_costs), base_tokens=batch)


def context_of(metrics: RequestMetrics) -> int:
    """How many tokens a request has, rounded up to a power of two: costs change little in between."""
    tokens = metrics.prompt_tokens + metrics.tokens
    return 1 << max(0, tokens - 1).bit_length()

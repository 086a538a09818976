"""``smart``: a node is drafted only if it raises the speed-up of the tree (Wang, Zhou 2026, arXiv 2604.09731).

The marginal benefit of a node is the probability that it is accepted, its marginal cost what its row adds to the
target's forward and, for a new level, what the drafter's forward takes, in autoregressive steps of the whole batch. It
is drafted where benefit over cost exceeds the round's speed-up without it, tokens per step.

Drafters that estimate the acceptance of their draft tokens apply this rule themselves once the budget states the costs
(:meth:`~outpace.controllers.base.Budget.best_draft_size`, ``drafting/dynamic_tree.py``, ``drafting/mixed_tree.py``).
For drafters that draw from a row without such an estimate, the acceptance is learned by the largest probability of the
row. It is decided before the draw, so no draft token is cut for what it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, Field

from outpace.controllers.acceptance_record import AcceptanceRecord
from outpace.controllers.base import Budget, Controller
from outpace.controllers.combined import CombinedController
from outpace.controllers.cost_model import CostModel, context_of
from outpace.controllers.draft_length import PATIENCE
from outpace.controllers.named import NamedController, Setup
from outpace.controllers.policy import DraftPolicy, DraftRow, JudgedRows
from outpace.controllers.predictor import chain_probs, speedups
from outpace.core.metrics import RequestMetrics
from outpace.core.tree import ROOT, TokenTree
from outpace.core.validation import StrictModel

_BUCKETS = 10


class SmartSettings(StrictModel):
    """Settings of ``smart``."""

    max_draft_tokens: int = Field(32, ge=1, le=128, description="maximum draft length")


@dataclass(slots=True)
class _Memory:
    """What one namespace has shown: acceptance by the largest probability of a row, and by depth."""

    by_row: list[AcceptanceRecord] = field(
        default_factory=lambda: [AcceptanceRecord((at + 0.5) / _BUCKETS) for at in range(_BUCKETS)]
    )
    by_depth: AcceptanceRecord = field(default_factory=AcceptanceRecord)

    def record(self, row: DraftRow) -> int:
        return min(_BUCKETS - 1, int(_BUCKETS * row.highest))


class _MarginalPolicy(JudgedRows):
    """One request's drafts. Steps and tokens are those of the whole batch: others commit a token each."""

    def __init__(self, memory: _Memory, *, together: bool = False) -> None:
        """``together``: all levels are drafted by one forward, so that only the first one takes time."""
        super().__init__()
        self._memory, self._together = memory, together
        self._idle = 0
        self._begin(Budget(0))

    def _begin(self, budget: Budget) -> None:
        first = budget.level_steps
        self._costs, self._level = budget.relative_costs or (1.0,), 0.0 if self._together else first
        self._nodes, self._tokens, self._spent = 0, budget.base_tokens, first
        self._probs: dict[int, float] = {ROOT: 1.0}
        self._children: dict[int, float] = {}
        """How likely a child of each node is accepted after it."""
        self._reached: dict[int, float] = {0: 1.0}
        """Expected accepted tokens by depth."""

    def budget(self, budget: Budget) -> Budget:
        super().budget(budget)
        self._begin(budget)
        if not self._promising(budget):
            self._idle += 1
            # Only a draft shows whether acceptance has changed.
            if self._idle < PATIENCE or self._idle & (self._idle - 1):
                return Budget(0)
        else:
            self._idle = 0
        return replace(budget, relative_costs=(), base_tokens=1.0)

    def _promising(self, budget: Budget) -> bool:
        """Whether a chain of some length is expected to gain, by the acceptance at each depth."""
        most, base = min(budget.depth, len(self._costs) - 1), budget.base_tokens
        rates = (self._memory.by_depth.rate(depth) for depth in range(1, most + 1))
        # Of one request among those of the batch: the others commit a token each.
        shares = (prob / base for prob in chain_probs(rates))
        steps = (self._costs[count] + self._spent + (count - 1) * self._level for count in range(1, most + 1))
        return any(one > 1.0 for one in speedups(shares, steps)[1:])

    @property
    def _pace(self) -> float:
        return self._tokens / (self._costs[min(self._nodes, len(self._costs) - 1)] + self._spent)

    def _rows(self, width: int) -> float:
        """What ``width`` more rows cost."""
        if self._nodes + width >= len(self._costs):
            return math.inf
        return self._costs[self._nodes + width] - self._costs[self._nodes]

    def runs(self, depth: int) -> bool:
        gain = self._reached.get(depth - 1, 0.0) * self._memory.by_depth.rate(depth)
        if gain <= self._pace * (self._level + self._rows(1)):
            return False
        self._spent += self._level
        return True

    def draws(self, node: int, above: int | None, depth: int, row: DraftRow, width: int = 1) -> bool:
        if above is not None and node not in self._probs:
            self._probs[node] = self._probs.get(above, 1.0) * self._children.get(above, 1.0)
        at = self._memory.record(row)
        each = self._memory.by_row[at].rate(depth)
        gain = self._probs.get(node, 1.0) * (1.0 - (1.0 - each) ** width)
        self.asked[node] = at
        if gain <= self._pace * self._rows(width):
            return False
        self._children[node] = each
        self._nodes += width
        self._tokens += gain
        self._reached[depth] = self._reached.get(depth, 0.0) + gain
        return True

    def rated(self, tree: TokenTree) -> None:
        for node, parent in enumerate(tree.parents):
            tree.path_acceptance_probs[node] = self._probs.get(parent, 1.0) * self._children.get(parent, 1.0)

    def judged(self, noted: Any, depth: int, *, accepted: bool) -> None:
        self._memory.by_row[noted].add(accepted, depth)
        self._memory.by_depth.add(accepted, depth)


class Smart(NamedController):
    """Drafts a node only where it raises the expected tokens per time of the round."""

    name = "smart"
    aliases = ("marginal",)
    paper = "Wang, Zhou 2026, arXiv 2604.09731 (SMART)"
    summary = "Drafts a node only if its expected gain over its cost exceeds the speed-up of the round so far."
    fits = "methods whose drafters estimate acceptance, or draw from a distribution"
    Settings = SmartSettings

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        super().__init__(setup, settings)
        assert isinstance(settings, SmartSettings)
        self._most = settings.max_draft_tokens
        self._costs = CostModel(setup.target, self._most)
        self._own = _weighing(setup.own, setup.target, self._most) if setup.combined else setup.own

    @classmethod
    def check(cls, setup: Setup) -> None:
        if not (setup.asks_policy or setup.weighs_costs or setup.combined):
            raise cls.refuse(setup, "its drafter neither estimates acceptance nor has a distribution to draw from")

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        if self.setup.combined:
            return self._own.budget(metrics, batch, repeatable)
        shape, known = self.setup.shape(metrics, batch, repeatable), self._costs.budget(metrics, batch, repeatable)
        level = self.setup.drafting.level(1, batch, context_of(metrics)) / known.base_tokens
        limited = shape.limited(min(shape.depth, self._most))
        return replace(limited, relative_costs=known.relative_costs, base_tokens=known.base_tokens, level_steps=level)

    def memory(self) -> Any:
        return None if self._weighs else _Memory()

    def policy(self, memory: Any, *, sampled: bool) -> DraftPolicy | None:
        return None if self._weighs else _MarginalPolicy(memory, together=self.setup.drafting.together)

    @property
    def _weighs(self) -> bool:
        """Whether the drafter weighs costs itself, so that there is nothing to decide within its drafts."""
        return self.setup.combined or self.setup.weighs_costs


class _Costed(Controller):
    """A part's own controller, whose budgets are given costs."""

    def __init__(self, own: Controller, costs: CostModel) -> None:
        self._own, self._costs = own, costs

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        own = self._own.budget(metrics, batch, repeatable)
        if own.relative_costs:
            return own
        known = self._costs.budget(metrics, batch, repeatable)
        return replace(own, relative_costs=known.relative_costs, base_tokens=known.base_tokens)


def _weighing(own: Controller, costs: Any, most: int) -> Controller:
    """A combination's controller, with costs for the parts that have a fixed length."""
    if not isinstance(own, CombinedController):
        return own
    parts = [_weighing(one, costs, most) if isinstance(one, CombinedController) else one for one in own.parts]
    return CombinedController([_Costed(one, CostModel(costs, most)) for one in parts], united=own.united)

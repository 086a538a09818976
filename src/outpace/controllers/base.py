"""Budget and Controller: how much to draft this round, and the expansion policy that drafters consult."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from outpace.controllers.predictor import best_count
from outpace.controllers.row_allocation import raised
from outpace.core.metrics import RequestMetrics

if TYPE_CHECKING:
    from outpace.controllers.policy import DraftPolicy, DraftRow
    from outpace.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a drafter may propose for one sequence in one round.

    ``depth``: draft tokens on the longest path; ``max_nodes``: nodes in the whole tree; ``topk``: children per node;
    ``confidence``: a probabilistic drafter stops before the next draw when its largest q falls below it.
    ``relative_costs[n]``: what the round of the whole batch costs with n draft tokens in it, in autoregressive steps of
    the batch; empty where unknown. ``base_tokens``: what such a round commits without this request's draft tokens: a
    token for each request that shares it, beside what draft tokens of the others are expected to add.
    ``parts``: the budgets of a combination's parts. ``policy``: asked before each draw, where a controller decides
    within the draft. ``level_steps``: what running another level of the draft takes, in autoregressive steps; 0 where
    the drafter knows better. ``Budget(0)`` means do not draft.
    """

    depth: int
    max_nodes: int = 64
    topk: int = 1
    confidence: float = 0.0
    relative_costs: tuple[float, ...] = ()
    base_tokens: float = 1.0
    parts: tuple[Budget, ...] = ()
    policy: DraftPolicy | None = None
    level_steps: float = 0.0
    _limited: dict[int, Budget] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What :meth:`limited` has made: the last rounds of every answer ask, and what is kept of a budget is found by its
    identity."""

    def limited(self, depth: int) -> Budget:
        """This budget, no deeper than ``depth`` (the room left in the answer or the context)."""
        deepest = self.depth
        for part in self.parts:
            deepest = part.depth if part.depth > deepest else deepest
        if deepest <= depth:
            return self
        found = self._limited.get(depth)
        if found is None:
            parts = tuple(part.limited(depth) for part in self.parts)
            found = self._limited[depth] = self._with(min(self.depth, max(0, depth)), self.relative_costs, parts)
        return found

    def after(self, steps: float) -> Budget:
        """The budget of a round in which a draft has already taken ``steps``: all costs are that much higher."""
        if not steps:
            return self
        costs = raised(self.relative_costs, steps)
        return self._with(self.depth, costs, tuple(part._with(part.depth, costs, part.parts) for part in self.parts))

    def costing(self, costs: tuple[float, ...]) -> Budget:
        """The same where a round costs ``costs`` instead."""
        return self._with(self.depth, costs, self.parts)

    def _with(self, depth: int, costs: tuple[float, ...], parts: tuple[Budget, ...]) -> Budget:
        # As dataclasses.replace, which takes several times as long: this runs for every request in every round.
        base, policy, level = self.base_tokens, self.policy, self.level_steps
        return Budget(depth, self.max_nodes, self.topk, self.confidence, costs, base, parts, policy, level)

    def best_draft_size(self, path_acceptance_probs: Iterable[float]) -> int:
        """How many draft tokens to take, in the given order, for the most expected tokens per time.

        ``path_acceptance_probs[i]`` is the probability that the whole path to the i-th is accepted, so n of them give
        base_tokens + sum(path_acceptance_probs[:n]) tokens for ``relative_costs[n]`` autoregressive steps (Chen et al.
        2024, arXiv 2402.12374, choose trees by this ratio). The draft tokens are deterministic: a sampled one is never
        dropped for its probability.
        """
        if not self.relative_costs:
            return min(self.max_nodes, len(list(path_acceptance_probs)))
        most = min(self.max_nodes, len(self.relative_costs) - 1)
        best, _ = best_count(islice(path_acceptance_probs, most), self.relative_costs, self.base_tokens)
        return best

    @property
    def price(self) -> float:
        """The probability of being accepted up to which no draft token is worth its row: n of them that are accepted
        with probability p raise the round's tokens per time only if p is above its costs' growth for each; 0 without
        costs."""
        return _price(self.relative_costs) * self.base_tokens if self.relative_costs else 0.0

    def wants(self, depth: int, confidence: float = 1.0) -> bool:
        """Whether to make a draw at ``depth`` (1 = first), given the largest probability of the row to draw from.

        Asked before the draw, so that no sampled draw is ever dropped for what it turned out to be.
        """
        return depth <= self.depth and confidence >= self.confidence

    def runs(self, depth: int) -> bool:
        """Whether to run the drafter for rows at ``depth``, from which a draw may then be made."""
        return depth <= self.depth and (self.policy is None or self.policy.runs(depth))

    def draws(self, node: int, above: int | None, depth: int, row: DraftRow, width: int = 1) -> bool:
        """Whether the policy, where there is one, wants ``width`` draws from ``row``: as :meth:`DraftPolicy.draws`."""
        return self.policy is None or self.policy.draws(node, above, depth, row, width)


@lru_cache(maxsize=256)
def _price(costs: tuple[float, ...]) -> float:
    return min(((cost / costs[0] - 1.0) / count for count, cost in enumerate(costs[1:], start=1)), default=0.0)


class Controller(ABC):
    """Turns what was measured so far into the next round's budget."""

    adapts: bool = False
    """Whether it chooses lengths for what costs and acceptance say, so that rounds of a batch may do without drafts
    where they are seen not to pay. A budget that states what a shared round costs says so, too."""

    def check_params(self, params: SamplingParams) -> None:  # noqa: B027 - most fit all
        """Raise BadInput when it does not fit the request's sampling parameters."""

    @abstractmethod
    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        """The budget for one request; ``batch`` requests share the round. ``repeatable``: its answer
        is sampled and must be the same again for its seed, so the budget must not depend on what rounds take now.
        """

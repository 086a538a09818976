"""A chain, and beside each of its tokens other candidates: more of them where the drafter is less sure.

SWIFT (Xia et al. 2025, arXiv 2410.06916, section 4.2) drafts one token a step and verifies a tree: after each token of
the chain hang further candidates for the next place, leaves all of them. How many there are follows from the
probability of the chain's token at temperature 1: the surer the drafter, the fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.tree_builder import TreeBuilder
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from torch import Tensor


_AS_THEY_ARE = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True)
class CandidateCounts:
    """How many candidates a step has, the chain's token included: for probabilities above ``above[0]``, above
    ``above[1]`` and so on, and the last for all others. ``greedy`` at temperature 0, else ``sampled``."""

    greedy: tuple[int, ...] = (3, 5, 8, 10)
    sampled: tuple[int, ...] = (1, 3, 5, 10)
    above: tuple[float, ...] = (0.95, 0.8, 0.5)

    @property
    def most(self) -> int:
        return max(*self.greedy, *self.sampled)

    def of(self, confidence: float, greedy: bool) -> int:
        """The count where the chain's token has the probability ``confidence``."""
        level = next((index for index, bound in enumerate(self.above) if confidence > bound), len(self.above))
        return (self.greedy if greedy else self.sampled)[level]


@dataclass(slots=True)
class _Step:
    token: int
    q: QRow | None
    siblings: list[int]


class ChainWithSiblings(TreeBuilder):
    """At temperature 0 the likeliest tokens, deterministic; else draws without replacement, the chain's token first.

    A step's siblings are drawn after its chain token is known, and the draft ends behind the first chain token whose
    probability is below ``budget.confidence``. Both decide about draws that have not been made: none is ever dropped.
    Rules that take draws one after the other are exact for such trees; rules that weigh a node's draws as one set are
    refused by :class:`~outpace.core.proposal.Proposal`, for they take no draws without replacement.
    """

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance, counts: CandidateCounts) -> None:
        super().__init__(sequence, budget, chance)
        self.counts = counts
        self._steps: list[_Step] = []
        self._nodes = 0

    def grow(self, logits: Tensor) -> bool:
        distribution, node = self._distribution(logits), len(self._drafted) - 1
        room = min(self.budget.max_nodes - self._nodes, self.budget.topk)
        if room < 1 or distribution.dead_end(node) or not self.budget.wants(self._depth + 1):
            return False
        step, confidence = (self._likeliest if self.sequence.params.greedy else self._drawn)(distribution, node, room)
        self._steps.append(step)
        self._depth += 1
        self._nodes += 1 + len(step.siblings)
        if self._nodes >= self.budget.max_nodes or not self.budget.wants(self._depth + 1, confidence):
            return False
        self._run_after(node, step.token)
        return True

    def _likeliest(self, distribution: TreeDistribution, node: int, room: int) -> tuple[_Step, float]:
        from outpace.targets.top import top_and_totals

        logits = distribution.processed([node])
        [(values, ids, total)] = top_and_totals(logits, min(room, max(self.counts.greedy)))
        confidence = math.exp(values[0] - total)
        count = min(room, self.counts.of(confidence, greedy=True))
        known = [token for token, value in zip(ids, values, strict=True) if value > -math.inf]
        return _Step(known[0], None, known[1:count]), confidence

    def _drawn(self, distribution: TreeDistribution, node: int, room: int) -> tuple[_Step, float]:
        q = distribution.at(node)
        token = self.chance.categorical(q)
        [unchanged] = self.sequence.sampler.open_rows(distribution.processed([node]), [0], _AS_THEY_ARE)
        confidence = 0.0 if unchanged is None else unchanged[token]
        more = min(room, self.counts.of(confidence, greedy=False)) - 1
        siblings: list[int] = []
        if more > 0:
            rest, total = q.residual(None, (token,))
            siblings = self.chance.ordered_sample(rest, more) if total > 0.0 else []
        return _Step(token, QRow(q), siblings), confidence

    def proposal(self) -> TokenTree:
        """The chain's tokens come first: they are what was run, and the verifying forward may take that over."""
        tree = TokenTree(replacement=False)
        node = ROOT
        for step in self._steps:
            node = tree.add(node, step.token, step.q)
        for depth, step in enumerate(self._steps):
            for token in step.siblings:
                tree.add(depth - 1, token, None if step.q is None else depth)
        return tree

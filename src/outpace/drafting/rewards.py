"""Rewards in [0, 1] of a draft after its verdict, for drafters that choose among drafters."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from outpace.acceptance.draws import proposal_distribution
from outpace.controllers.base import Budget
from outpace.controllers.predictor import nominal_costs
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Sequence, TreeScores

Reward = Literal["length", "divergence", "pace"]
BLOCK = 8
"""Lengths are rewarded up to this one: on the scale of the longest draft, all that is common would be near 0."""


@dataclass(slots=True)
class Pull:
    """One draft that is waiting for its verdict. ``budget``: what any part might have drafted; ``steps``: how long the
    draft took, in autoregressive steps of the target; ``keeps_unverified_draws``: whether what is not reached lives
    on."""

    arm: int
    probability: float
    tree: TokenTree
    at: int
    budget: Budget
    steps: float = 0.0
    keeps_unverified_draws: bool = False

    @property
    def block(self) -> int:
        """Positions that the reward is over."""
        return max(1, min(BLOCK, self.budget.depth))


def accepted(tree: TokenTree, committed: Seq[int]) -> int:
    """How many of the ``committed`` tokens a draft foresaw, from the first on."""
    return len(tree.follow(committed))


def length_reward(pull: Pull, sequence: Sequence) -> float:
    """Accepted draft tokens over the most that could have been: the block efficiency, normalised."""
    return min(1.0, accepted(pull.tree, sequence.tokens[pull.at :]) / pull.block)


def divergence_reward(pull: Pull, sequence: Sequence, scores: TreeScores) -> float:
    """Block divergence (Kim, Jung, Yun 2026, arXiv 2604.05417): the mean of 1 - TV(p, q) over the draft's positions.

    It varies less than the accepted length, for it does not hang on what was drawn. Read along the first draw of every
    node; a certain draft token has a one-hot q. Positions that were not drafted count as nothing foreseen. Draws that
    live on into later rounds must not be looked at before their time: of those drafts only what was reached counts.
    """
    tree, scored = pull.tree, scores.tree
    # Penalties have moved on since: of such requests, too, only rows that the rule has read are read again.
    careful = pull.keeps_unverified_draws or sequence.params.path_dependent
    positions = min(pull.block, accepted(tree, sequence.tokens[pull.at :]) + 1) if careful else pull.block
    total, node, where = 0.0, ROOT, ROOT
    for _ in range(positions):
        draws = tree.draws_at(node)
        if not draws:
            break
        p = scores.p(where)
        q = proposal_distribution(tree, (), draws[0], p)
        total += float(p[draws[0].token]) if q is None else float(q.minimum(p).sum())
        child = scored.child(where, draws[0].token)
        if child is None:
            break  # a combination around this one left it out
        node, where = draws[0].node, child
    return total / pull.block


def pace_reward(pull: Pull, sequence: Sequence) -> float:
    """Tokens per autoregressive step's time, over the best that the budget allows. Draft time counts where it was
    measured."""
    relative_costs = pull.budget.relative_costs or nominal_costs(pull.budget.depth)
    relative_cost = relative_costs[min(len(pull.tree), len(relative_costs) - 1)]
    tokens = 1 + accepted(pull.tree, sequence.tokens[pull.at :])
    best = max((1 + n) / relative_costs[min(n, len(relative_costs) - 1)] for n in range(pull.budget.depth + 1))
    return tokens / (relative_cost + pull.steps) / best

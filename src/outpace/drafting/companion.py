"""Companion: a second draft model that scores what a drafter has drafted; it drafts nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import TYPE_CHECKING

from outpace.controllers.base import Budget
from outpace.core.proposal import Proposal
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.model_drafter import DraftModel, ModelDraftState
from outpace.drafting.tree_builder import TreeBuilder
from outpace.targets.base import Target

if TYPE_CHECKING:
    from torch import Tensor


class GivenTree(TreeBuilder):
    """Runs the nodes of a tree that is there already, all in one forward."""

    given = TokenTree()
    found: TreeDistribution

    def catch_up(self, tokens: Iterable[int]) -> None:
        super().catch_up(tokens)
        for parent, token in zip(self.given.parents, self.given.tokens, strict=True):
            self._run_after(parent, token)

    def grow(self, logits: Tensor) -> bool:
        self.found = self._distribution(logits)
        return False

    def proposal(self) -> TokenTree:
        return self.given


class Companion(DraftModel):
    """Keeps K/V beside the requests as a draft model does."""

    def __init__(self, model: Target) -> None:
        super().__init__(model, GivenTree, Proposal(tree=True))
        self._given: dict[int, TokenTree] = {}

    def score(self, states: Seq[ModelDraftState], trees: Seq[TokenTree]) -> list[TreeDistribution | None]:
        """The companion's distributions at all nodes of ``trees``; None where its context has no room for one."""
        self._given = {id(state.draft_sequence): tree for state, tree in zip(states, trees, strict=True)}
        self.propose_batch(states, [Budget(max(tree.depths, default=0), len(tree)) for tree in trees])
        self._given = {}
        return [state.builder.found if isinstance(state.builder, GivenTree) else None for state in states]

    def start(self, state: ModelDraftState, budget: Budget) -> TreeBuilder:
        tree = self._given[id(state.draft_sequence)]
        builder = GivenTree(state.draft_sequence, budget, self.chance(state.sequence))
        builder.given = tree if max(tree.depths, default=0) <= budget.depth else TokenTree()
        return builder


def overlap(one: TokenDistribution, other: TokenDistribution) -> float:
    """sum of min(p, q) over all tokens: how often a token of one is accepted of the other."""
    import torch

    p, q = one.dense(), other.dense()
    return float(torch.minimum(p, q.to(p.device)).sum())


def agreements(tree: TokenTree, found: TreeDistribution, *, greedy: bool) -> list[tuple[float, bool]]:
    """By node of a deterministic tree: the companion's probability of its token, at temperature 1 for greedy requests,
    and whether it is the companion's likeliest."""
    rows: dict[int, tuple[Tensor, float]] = {}
    out = []
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        if parent not in rows:
            row = found.processed([parent])[0].softmax(-1) if greedy else found.p(parent)
            rows[parent] = row, float(row.max())
        row, best = rows[parent]
        out.append((float(row[token]), float(row[token]) >= best))
    return out


def chain_prefix(tree: TokenTree, count: int) -> TokenTree:
    """The first ``count`` draws of a chain, with their q rows. What decides about a draw must not depend on it."""
    cut = TokenTree(replacement=tree.replacement)
    for draw in tree.draws[:count]:
        prob = tree.path_acceptance_probs[draw.node]
        cut.add(draw.parent, draw.token, None if draw.q_row < 0 else tree.q_rows[draw.q_row], prob)
    return cut

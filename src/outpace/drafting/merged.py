"""Merge: the trees of several drafters united; equal nodes once, every draw kept."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.combination import Combined, CombinedState, union_of
from outpace.targets.base import Scores, Sequence, TreeScores


def cut(tree: TokenTree, budget: Budget) -> TokenTree:
    """The best part of a deterministic tree for the budget: the likeliest paths first, parents before children."""
    order, probs = tree.likeliest_first()
    return tree.only(order[: budget.best_draft_size(probs)])


def contributed(part: TokenTree, whole: TokenTree) -> bool:
    """Whether anything of a part's tree is in the tree that was made of several."""
    if not part.tokens or part is whole:
        return bool(part.tokens)
    return any(whole.child(ROOT, part.tokens[node]) is not None for node in part.children(ROOT))


NO_DRAFT = TokenTree()
"""What stands for the tree of a round in which there is none: nobody adds to it, or proposes it."""


@dataclass(slots=True)
class MergeState(CombinedState):
    """``united``: the tree that was proposed in the round under way. ``drafts``: the trees of the parts."""

    united: TokenTree = field(default_factory=lambda: NO_DRAFT)
    drafts: tuple[TokenTree, ...] = ()


M = TypeVar("M", bound=MergeState)


class MergedTrees(Combined[M], ABC):
    """United trees. Deterministic parts are united first and cut; they stand where the first of them stands."""

    single_path: bool = False
    """Whether every part drafts one deterministic path, and the best of them alone is wanted: for engines that verify
    no more."""

    def __init__(self, parts: Seq[Drafter[Any]], names: Seq[str]) -> None:
        super().__init__(parts, names, union_of([part.proposal for part in parts]))

    def propose_batch(self, states: Seq[M], budgets: Seq[Budget]) -> list[TokenTree]:
        asked = [self.ask(index, states, budgets) for index in range(len(self.parts))]
        for state, trees, budget in zip(states, zip(*asked, strict=True), budgets, strict=True):
            state.united = self.unite(trees, budget, greedy=state.sequence.params.greedy)
            state.drafts = trees
            for name, tree in zip(self.names, trees, strict=True):
                state.rounds[name] += contributed(tree, state.united)
        return [state.united for state in states]

    def unite(self, trees: Seq[TokenTree], budget: Budget, *, greedy: bool) -> TokenTree:
        """The trees of the parts as one: deterministic ones cut to what is expected to gain, sampled ones whole."""
        if self.single_path:
            return max(trees, key=_expected_tokens)
        certain = [index for index, tree in enumerate(trees) if self.parts[index].may_be_cut(tree, greedy=greedy)]
        if not certain:
            return TokenTree.merge(trees)
        whole = cut(TokenTree.merge(trees[index] for index in certain), budget)
        if len(certain) == len(trees):
            return whole
        rest = [whole if index == certain[0] else tree for index, tree in enumerate(trees)]
        return TokenTree.merge(tree for index, tree in enumerate(rest) if index not in certain[1:])

    def reusable_forward(self, states: Seq[M]) -> Scores | None:
        """That of a part whose draft the united trees begin with: the first part's, if it has one."""
        for index, part in enumerate(self.parts):
            scores = part.reusable_forward([state.parts[index] for state in states])
            if scores is not None and all(map(_extends, states, scores.parts)):
                return scores
        return None

    def part_trees(self, state: M) -> Seq[TokenTree]:
        """What the parts, in order, have drafted in the round under way."""
        return state.drafts

    def drafted_by(self, state: M, path: Seq[int]) -> list[str | None]:
        found: list[str | None] = []
        for index, tree in enumerate(self.part_trees(state)):
            reached = len(tree.follow(path))
            if reached > len(found):
                found += self.part_drafted_by(state, index, path[:reached])[len(found) :]
        return [*found, *[None] * (len(path) - len(found))]

    def observe_batch(self, states: Seq[M], verdicts: Seq[Verdict]) -> None:
        super().observe_batch(states, verdicts)
        for state in states:
            state.united, state.drafts = NO_DRAFT, ()


class Merge(MergedTrees[MergeState]):
    """United trees, every part asked in every round."""

    def opened(self, sequence: Sequence, parts: list[Any]) -> MergeState:
        return MergeState(sequence, parts)


def _expected_tokens(path: TokenTree) -> float:
    return sum(path.path_acceptance_probs)


def _extends(state: MergeState, part: TreeScores) -> bool:
    whole, done = state.united, part.nodes
    return whole.tokens[:done] == part.tree.tokens[:done] and whole.parents[:done] == part.tree.parents[:done]

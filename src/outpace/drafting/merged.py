"""Merge: the trees of several drafters united; equal nodes once, every draw kept."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.combination import Combined, union_of
from outpace.targets.base import Scores, Sequence, TreeScores


def cut(tree: TokenTree, budget: Budget) -> TokenTree:
    """As much of a deterministic tree as pays: the likeliest paths first, parents before children."""
    # An estimate is of the whole path, so a child's may be above its parent's only where two drafters disagree.
    reachable = list(tree.path_acceptance_probs)
    for node, parent in enumerate(tree.parents):
        if parent != ROOT:
            reachable[node] = min(reachable[node], reachable[parent])
    order = sorted(range(len(tree)), key=lambda node: (-reachable[node], node))
    kept = order[: budget.best_draft_size(reachable[node] for node in order)]
    out, where = TokenTree(), {ROOT: ROOT}
    for node in kept:
        where[node] = out.add(
            where[tree.parents[node]], tree.tokens[node], path_acceptance_prob=tree.path_acceptance_probs[node]
        )
    return out


class Merge(Combined):
    """United trees. Deterministic parts are united first and cut; they stand where the first of them stands."""

    def __init__(self, parts: Seq[Drafter], names: Seq[str]) -> None:
        super().__init__(parts, names, union_of([part.proposal for part in parts]))
        self._proposed: dict[Sequence, TokenTree] = {}

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        asked = [self.ask(index, sequences, budgets) for index in range(len(self.parts))]
        united = [self._unite(trees, budget) for trees, budget in zip(zip(*asked, strict=True), budgets, strict=True)]
        self._proposed.update(zip(sequences, united, strict=True))
        return united

    def _unite(self, trees: Seq[TokenTree], budget: Budget) -> TokenTree:
        certain = [index for index, tree in enumerate(trees) if self._may_be_cut(index, tree)]
        if not certain:
            return TokenTree.merge(trees)
        whole = cut(TokenTree.merge(trees[index] for index in certain), budget)
        rest = [whole if index == certain[0] else tree for index, tree in enumerate(trees)]
        return TokenTree.merge(tree for index, tree in enumerate(rest) if index not in certain[1:])

    def _may_be_cut(self, index: int, tree: TokenTree) -> bool:
        """By what the part declares: whether a sampled part's tree came out deterministic may depend on its draws."""
        return not self.parts[index].proposal.sampled and not tree.auxiliary_tokens

    def reusable_forward(self, sequences: Seq[Sequence]) -> Scores | None:
        """That of a part whose draft the united trees begin with: the first part's, if it has one."""
        for part in self.parts:
            scores = part.reusable_forward(sequences)
            if scores is not None and all(map(self._extends, sequences, scores.parts)):
                return scores
        return None

    def _extends(self, sequence: Sequence, part: TreeScores) -> bool:
        whole, done = self._proposed.get(sequence, TokenTree()), part.nodes
        return whole.tokens[:done] == part.tree.tokens[:done] and whole.parents[:done] == part.tree.parents[:done]

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        super().observe(sequences, scores, verdicts)
        for sequence in sequences:
            self._proposed.pop(sequence, None)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._proposed.pop(sequence, None)

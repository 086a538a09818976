"""What drafters made of drafters share: parts with budgets and random streams of their own, told of every round.

Each part is a whole drafter, itself a combination perhaps. It lives through every request, whether or not it drafts in
a round, so that it has learned what it can when its turn comes.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.metrics import CacheUse
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.targets.base import Scores, Sequence, TreeScores


def one_of(proposals: Seq[Proposal]) -> Proposal:
    """What is drafted when one of several drafters drafts at a time."""
    return Proposal(
        tree=any(one.tree for one in proposals),
        sampled=any(one.sampled for one in proposals),
        replacement=all(one.replacement for one in proposals),
        one_sampled_sibling=any(one.sampled for one in proposals) and all(_at_most_one_draw(one) for one in proposals),
        keeps_unverified_draws=any(one.keeps_unverified_draws for one in proposals),
        mixed=_mixed(proposals),
    )


def union_of(proposals: Seq[Proposal]) -> Proposal:
    """What is drafted when the trees of several drafters are united.

    Siblings are functions of the path to their parent where they are not sampled, and no two parts share a number: so
    with one sampled part, of one draw a node, the union has one too. Two sampled parts may meet at a node.
    """
    if len(proposals) == 1:
        return proposals[0]
    sampled = [one for one in proposals if one.sampled]
    return replace(
        one_of(proposals), tree=True, one_sampled_sibling=len(sampled) == 1 and _at_most_one_draw(sampled[0])
    )


def _at_most_one_draw(one: Proposal) -> bool:
    return not one.sampled or not one.tree or one.one_sampled_sibling


def _mixed(proposals: Seq[Proposal]) -> bool:
    """Whether siblings need not all be draws of one row."""
    return any(one.mixed for one in proposals) or len(proposals) > 1


class Combined(Drafter, ABC):
    """Fans out to its parts all that happens to a request. Subclasses say who drafts.

    ``names`` are shown beside the parts' caches.
    """

    def __init__(self, parts: Seq[Drafter], names: Seq[str], proposal: Proposal) -> None:
        self.parts = tuple(parts)
        self.names = tuple(names)
        self.proposal = proposal
        self.learns_from_rejected = any(part.learns_from_rejected for part in parts)
        self.needs_target_internals = any(part.needs_target_internals for part in parts)
        self.aux_hidden_state_layers = tuple(
            sorted({layer for part in parts for layer in part.aux_hidden_state_layers})
        )
        self.nest(self.purpose)

    def nest(self, purpose: str) -> None:
        self.purpose = purpose
        for index, part in enumerate(self.parts):
            part.nest(f"{purpose}/{index}")

    def begin(self, sequence: Sequence) -> None:
        for part in self.parts:
            part.begin(sequence)

    def on_prefill(self, sequence: Sequence, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        for part in self.parts:
            if part.aux_hidden_state_layers:
                part.on_prefill(
                    sequence, position, {layer: hidden_states[layer] for layer in part.aux_hidden_state_layers}
                )

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for part in self.parts:
            part.observe(sequences, scores, verdicts)

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        for part in self.parts:
            part.fork(sequence, twin)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        for part in self.parts:
            part.rewind(sequence, kept)

    def caches(self, sequence: Sequence) -> tuple[CacheUse, ...]:
        return tuple(
            replace(use, name=f"{name}: {use.name}")
            for name, part in zip(self.names, self.parts, strict=True)
            for use in part.caches(sequence)
        )

    def end(self, sequence: Sequence) -> None:
        for part in self.parts:
            part.end(sequence)

    def ask(self, index: int, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        """The trees of part ``index`` for those of the sequences that its budgets let it draft for."""
        mine = [part_budget(budget, index) for budget in budgets]
        wanted = [at for at, budget in enumerate(mine) if budget.depth > 0]
        trees = [TokenTree() for _ in sequences]
        if wanted:
            proposed = self.parts[index].propose([sequences[at] for at in wanted], [mine[at] for at in wanted])
            for at, tree in zip(wanted, proposed, strict=True):
                trees[at] = tree
        return trees


def part_budget(budget: Budget, index: int) -> Budget:
    """The budget of one part; that of the whole where there are none for parts."""
    return budget.parts[index] if budget.parts else budget


class OneAtATime(Combined, ABC):
    """Combinations in which one part drafts for a request in a round."""

    def __init__(self, parts: Seq[Drafter], names: Seq[str]) -> None:
        super().__init__(parts, names, one_of([part.proposal for part in parts]))
        self._drafting: dict[Sequence, int] = {}
        """Who drafted in the round under way."""

    def reusable_forward(self, sequences: Seq[Sequence]) -> Scores | None:
        chosen = {self._drafting.get(sequence) for sequence in sequences}
        index = chosen.pop() if len(chosen) == 1 else None
        return None if index is None else self.parts[index].reusable_forward(sequences)

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        super().observe(sequences, scores, verdicts)
        for sequence in sequences:
            self._drafting.pop(sequence, None)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._drafting.pop(sequence, None)

"""What drafters made of drafters share: parts with budgets and random streams of their own, told of every round.

Each part is a whole drafter, itself a combination perhaps. It lives through every request, whether or not it drafts in
a round, so that it has learned what it can when its turn comes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.metrics import CacheUse
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.grammar_pruning import without_forbidden
from outpace.targets.base import Scores, Sequence

if TYPE_CHECKING:
    from torch import Tensor


def one_of(proposals: Seq[Proposal]) -> Proposal:
    """What is drafted when one of several drafters drafts at a time."""
    return Proposal(
        tree=any(one.tree for one in proposals),
        sampled=any(one.sampled for one in proposals),
        replacement=all(one.replacement for one in proposals),
        one_sampled_sibling=any(one.sampled for one in proposals) and all(_at_most_one_draw(one) for one in proposals),
        shares_noise=all(one.shares_noise or not one.sampled for one in proposals)
        and any(one.sampled for one in proposals),
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


@dataclass(slots=True)
class CombinedState(DraftState):
    """``parts``: the states of the parts. ``drafting``: which part drafts in the round under way, where one does.
    ``rounds``: in how many each part drafted, by its name.
    """

    parts: list[Any]
    drafting: int | None = None
    rounds: Counter[str] = field(default_factory=Counter)


C = TypeVar("C", bound=CombinedState)


class Combined(Drafter[C], ABC):
    """Passes to its parts all that happens to a request. Subclasses choose which part drafts.

    ``names`` are shown beside the parts' caches and counters.
    """

    def __init__(self, parts: Seq[Drafter[Any]], names: Seq[str], proposal: Proposal) -> None:
        self.parts = tuple(parts)
        self.names = tuple(names)
        self.proposal = proposal
        self.learns_from_rejected = any(part.learns_from_rejected for part in parts)
        self.needs_target_internals = any(part.needs_target_internals for part in parts)
        self.states_draft_steps = all(part.states_draft_steps for part in parts)
        self.aux_hidden_state_layers = tuple(
            sorted({layer for part in parts for layer in part.aux_hidden_state_layers})
        )
        self.nest(self.purpose)

    @property
    def prefill_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for part in self.parts for layer in part.prefill_layers}))

    def observed_layers(self, states: Seq[C], idle: int) -> Seq[int]:
        return [layer for index in range(len(self.parts)) for layer in self.part_layers(index, states, idle)]

    def part_layers(self, index: int, states: Seq[C], idle: int) -> Seq[int]:
        """:meth:`observed_layers` of part ``index``; a request may have none of it."""
        part = self.parts[index]
        mine = [state.parts[index] for state in states if state.parts[index] is not None]
        return part.observed_layers(mine, idle) if mine and part.aux_hidden_state_layers else ()

    @abstractmethod
    def opened(self, sequence: Sequence, parts: list[Any]) -> C:
        """The state of a request that joins, around the states of the parts."""

    def nest(self, purpose: str) -> None:
        self.purpose = purpose
        for index, part in enumerate(self.parts):
            part.nest(f"{purpose}/{index}")

    @property
    def remembers(self) -> bool:
        return super().remembers or any(part.remembers for part in self.parts)

    def measure(self, batch: int, *, sampled: bool | None = None) -> None:
        for part in self.parts:
            part.measure(batch, sampled=sampled)

    def begin(self, sequence: Sequence) -> C:
        return self.opened(sequence, [part.begin(sequence) for part in self.parts])

    def on_prefill(self, state: C, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        for part, mine in zip(self.parts, state.parts, strict=True):
            if part.prefill_layers:
                part.on_prefill(mine, position, {layer: hidden_states[layer] for layer in part.prefill_layers})

    def observe_batch(self, states: Seq[C], verdicts: Seq[Verdict]) -> None:
        for index, part in enumerate(self.parts):
            part.observe_batch([state.parts[index] for state in states], verdicts)

    def rewind(self, state: C, sequence: Sequence, kept: int) -> C:
        state.parts = [part.rewind(mine, sequence, kept) for part, mine in zip(self.parts, state.parts, strict=True)]
        return state

    def caches(self, state: C) -> tuple[CacheUse, ...]:
        return tuple(
            replace(use, name=f"{name}: {use.name}")
            for name, part, mine in zip(self.names, self.parts, state.parts, strict=True)
            for use in part.caches(mine)
        )

    def drafting(self, state: C) -> dict[str, int]:
        return {name: state.rounds[name] for name in self.names}

    def end(self, state: C) -> None:
        for part, mine in zip(self.parts, state.parts, strict=True):
            part.end(mine)

    def part_drafted_by(self, state: C, index: int, path: Seq[int]) -> list[str | None]:
        """:meth:`drafted_by` for a path that part ``index`` drafted."""
        return [inner or self.names[index] for inner in self.parts[index].drafted_by(state.parts[index], path)]

    def ask(self, index: int, states: Seq[C], budgets: Seq[Budget]) -> list[TokenTree]:
        """The trees of part ``index`` for those of the sequences that its budgets let it draft for."""
        return self.ask_within(index, states, [part_budget(budget, index) for budget in budgets])

    def ask_within(self, index: int, states: Seq[C], budgets: Seq[Budget]) -> list[TokenTree]:
        """The same by the part's own budgets."""
        trees = self._proposed(index, states, budgets)
        if not self.proposal.sampled:  # the whole may be cut
            return trees
        part = self.parts[index]
        return [
            without_forbidden(part, state.parts[index], state.sequence, tree)
            for state, tree in zip(states, trees, strict=True)
        ]

    def _proposed(self, index: int, states: Seq[C], budgets: Seq[Budget]) -> list[TokenTree]:
        wanted = [at for at, budget in enumerate(budgets) if budget.depth > 0]
        if not wanted:
            return [TokenTree() for _ in states]
        if len(wanted) == len(states):
            return self.parts[index].propose_batch([state.parts[index] for state in states], budgets)
        asked = [states[at].parts[index] for at in wanted]
        proposed = iter(self.parts[index].propose_batch(asked, [budgets[at] for at in wanted]))
        return [next(proposed) if budget.depth > 0 else TokenTree() for budget in budgets]


def part_budget(budget: Budget, index: int) -> Budget:
    """The budget of one part; that of the whole where there are none for parts."""
    return budget.parts[index] if budget.parts else budget


class OneAtATime(Combined[C], ABC):
    """Combinations in which one part drafts for a request in a round: ``state.drafting``."""

    def __init__(self, parts: Seq[Drafter[Any]], names: Seq[str]) -> None:
        super().__init__(parts, names, one_of([part.proposal for part in parts]))

    def reusable_forward(self, states: Seq[C]) -> Scores | None:
        chosen = {state.drafting for state in states}
        index = chosen.pop() if len(chosen) == 1 else None
        return None if index is None else self.parts[index].reusable_forward([state.parts[index] for state in states])

    def drafted_by(self, state: C, path: Seq[int]) -> list[str | None]:
        if state.drafting is None:
            return super().drafted_by(state, path)
        return self.part_drafted_by(state, state.drafting, path)

    def observe_batch(self, states: Seq[C], verdicts: Seq[Verdict]) -> None:
        super().observe_batch(states, verdicts)
        for state in states:
            state.drafting = None

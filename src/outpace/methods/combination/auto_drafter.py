"""The drafter of ``auto``: each round the free part, the learned part, both or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.yields import PRIOR_COST, Clock, Round, Standing, Yield
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.merged import MergedTrees, MergeState, contributed
from outpace.drafting.namespaces import Namespaces
from outpace.engine.rehearsal import draft_seconds
from outpace.targets.base import Sequence, Target

NOMINAL_DRAFT = 0.25
"""A learned draft's time in autoregressive steps, where costs are fixed."""

_STANDINGS: WeakKeyDictionary[Target, dict[str, Standing]] = WeakKeyDictionary()
"""What greedy requests of this process have seen of the learned parts beside a target, by the part's identity."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A round in which the learned part was asked: the tokens there were, and the draft and the cost, in autoregressive
    steps, of the round without it."""

    at: int
    alone: TokenTree
    steps: float

    def without(self, sequence: Sequence) -> Round:
        """The round as it would have been without the learned part, once the tokens are known."""
        committed = sequence.tokens[self.at :]
        return Round(min(len(committed), 1 + len(self.alone.follow(committed))), self.steps)


@dataclass(slots=True)
class AutoState(MergeState):
    """What the namespace knows, and the round under way."""

    known: Yield = field(kw_only=True)
    asked: _Asked | None = None
    steps: float = 1.0
    """What the round under way should cost, in autoregressive steps."""
    begun: bool = False
    """Whether the learned part has drafted: its first draft reads the prompt, which no later one does."""


class Auto(MergedTrees[AutoState]):
    """``parts``: the free one, and the learned one where there is one, whose budgets ``controller`` gives when its
    draft is timed. ``identity``: tells the learned part from others beside the target."""

    def __init__(
        self,
        parts: Seq[Drafter[Any]],
        names: Seq[str],
        target: Target,
        namespaces: int = 64,
        *,
        controller: Controller | None = None,
        identity: Callable[[], str] = str,
    ) -> None:
        super().__init__(parts, names)
        self.target = target
        self._controller = controller or CostModel(target.costs)
        self._identity = identity
        self.clock = Clock()
        self.step = Clock()
        """Seconds of an autoregressive step, by whole rounds without the learned part and what they should cost."""
        self._began: float | None = None
        self._memory = Namespaces(lambda: Yield(self._standing), namespaces)
        self._sampled_memory = Namespaces(Yield, namespaces)
        """Of sampled requests, whose drafts must not depend on what other requests' clocks have shown."""

    @cached_property
    def _standing(self) -> Standing:
        return _STANDINGS.setdefault(self.target, {}).setdefault(self._identity(), Standing())

    def opened(self, sequence: Sequence, parts: list[Any]) -> AutoState:
        memory = self._memory if sequence.params.greedy else self._sampled_memory
        return AutoState(sequence, parts, known=memory.open(sequence))

    def rewind(self, state: AutoState, sequence: Sequence, kept: int) -> AutoState:
        state.asked = None
        return super().rewind(state, sequence, kept)

    # ------------------------------------------------------------------------------------------------- drafting

    def propose_batch(self, states: Seq[AutoState], budgets: Seq[Budget]) -> list[TokenTree]:
        drafts = [self._draft_steps(state.sequence, len(states)) for state in states]
        self._began = perf_counter()
        # With a draft's time spent anyway more tokens gain; the free part shows what it has for that case.
        after = [_after(budget, steps) for budget, steps in zip(budgets, drafts, strict=True)]
        free = self.ask(0, states, after)
        learned = []
        for at, (state, budget, tree) in enumerate(zip(states, budgets, free, strict=True)):
            state.asked = None
            count, alone = _alone(tree, budget)
            state.steps = alone.steps
            state.united = tree if count == len(tree) or tree.auxiliary_tokens else tree.first(count)
            if self._may_ask_learned(budget) and state.known.wanted(alone, drafts[at]):
                learned.append(at)
                state.asked = _Asked(len(state.sequence.tokens), state.united, alone.steps)
        if learned:
            self._join(learned, states, budgets, after, drafts, free)
        for at, state in enumerate(states):
            if at not in learned:
                state.rounds[self.names[0]] += len(state.united) > 0
        return [state.united for state in states]

    def _may_ask_learned(self, budget: Budget) -> bool:
        return len(self.parts) > 1 and (budget.parts[1] if budget.parts else budget).depth > 0

    def _join(
        self,
        learned: Seq[int],
        states: Seq[AutoState],
        budgets: Seq[Budget],
        after: Seq[Budget],
        drafts: Seq[float],
        free: Seq[TokenTree],
    ) -> None:
        """Let the learned part draft for some of the sequences, and unite its trees with the free part's."""
        asking = [states[at] for at in learned]
        began = perf_counter()
        drafted = self.ask(1, asking, [budgets[at] for at in learned])
        if all(state.begun for state in asking):
            self.clock.read(len(learned), perf_counter() - began)
        for at, state, tree in zip(learned, asking, drafted, strict=True):
            whole = state.united = self.unite((free[at], tree), after[at])
            costs = after[at].relative_costs
            state.steps = costs[min(len(whole), len(costs) - 1)] if costs else 1.0 + PRIOR_COST + drafts[at]
            state.begun = True
            for name, part in zip(self.names, (free[at], tree), strict=True):
                state.rounds[name] += contributed(part, whole)

    def _draft_steps(self, sequence: Sequence, count: int) -> float:
        """How long the learned part would take for ``count`` sequences, in autoregressive steps over them."""
        if len(self.parts) == 1:
            return 0.0
        # A sampled answer must not depend on this clock: it goes by one rehearsal, kept with the target's costs.
        live = self.clock.seconds(count) if sequence.params.greedy else None
        return self.target.costs.steps(lambda: self._rehearsed(count) if live is None else live, NOMINAL_DRAFT, count)

    def _rehearsed(self, count: int) -> float:
        size = 1 << (count - 1).bit_length()
        return self.target.costs.once(
            f"draft of {self.names[1]} {self._identity()} for {size} sequences",
            lambda: draft_seconds(self.target, self.parts[1], self._controller, size),
        )

    def observe_batch(self, states: Seq[AutoState], verdicts: Seq[Verdict]) -> None:
        super().observe_batch(states, verdicts)
        # A round that it was not asked to draft in has no beginning here, and tells nothing.
        took = 0.0 if self._began is None else perf_counter() - self._began
        self._began, count = None, len(states)
        if took and all(state.asked is None for state in states):
            self.step.read(count, took / mean(state.steps for state in states))
        for state in states:
            if state.asked is not None:
                timed = state.sequence.params.greedy and took > 0.0 and not self.target.costs.fixed
                # The whole round: beside its draft and its rows, a draft slows down what then runs with cold caches.
                steps = took / (self.step.seconds(count) or self.target.costs.seconds(count)) if timed else state.steps
                found = Round(len(state.sequence.tokens) - state.asked.at, steps)
                state.known.learn(state.asked.without(state.sequence), found)
                state.asked = None


def _after(budget: Budget, steps: float) -> Budget:
    """The budget of a round in which a draft has already taken ``steps``: all costs are that much higher."""
    if not steps:
        return budget
    costs = tuple(cost + steps for cost in budget.relative_costs)
    parts = tuple(replace(part, relative_costs=costs) for part in budget.parts)
    return replace(budget, relative_costs=costs, parts=parts)


def _alone(tree: TokenTree, budget: Budget) -> tuple[int, Round]:
    """The best size of the free part's draft by itself, and what is expected of such a round."""
    count = budget.best_draft_size(tree.path_acceptance_probs)
    expected = 1.0 + sum(tree.path_acceptance_probs[:count])
    return count, Round(expected, budget.relative_costs[count] if budget.relative_costs else 1.0)

"""The drafter of ``aio``: each request is given one part, which alone drafts for it and learns from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.metrics import CacheUse, RequestMetrics
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.combination import CombinedState, OneAtATime
from outpace.drafting.namespaces import Namespaces
from outpace.methods.combination.aio.prompt_features import FEATURES, PromptFeatures
from outpace.methods.combination.aio.routing import MakeRoutes, Routes
from outpace.targets.base import Sequence, Target
from outpace.targets.costs import CONTEXTS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class RequestRoute(CombinedState):
    """``drafting``: the part that was chosen, None before that; other parts have no state. ``numbers``: of the prompt;
    ``odds``: of the parts. ``shown``, ``levels``: what became of its drafts, and how many levels they had in all.
    ``drafted_in``: seconds of the draft of the round under way, beside which others may have drafted."""

    numbers: tuple[float, ...] = field(kw_only=True)
    routes: Routes = field(kw_only=True)
    odds: list[float] = field(default_factory=list)
    shown: RequestMetrics = field(default_factory=RequestMetrics)
    levels: int = 0
    drafted_in: float | None = None


class Routed(OneAtATime[RequestRoute]):
    """One part a request, chosen before anything is drafted for it, by its prompt and by earlier requests alone.

    Requests that join together are chosen for when all have joined, because what a row costs depends on how many
    requests share a round. What a part measures first is measured as they join.
    """

    def __init__(
        self,
        parts: Seq[Drafter[Any]],
        names: Seq[str],
        target: Target,
        features: PromptFeatures,
        make: MakeRoutes,
        explore: float,
        most: int,
    ) -> None:
        super().__init__(parts, names)
        self.features, self.explore = features, explore
        self._target, self._make = target, make
        self.routes = make(True)
        """Of greedy requests whose drafts change no answer, of all namespaces: figures alone."""
        self.sampled_routes: Namespaces[Routes] = Namespaces(lambda: make(False), most)
        """Of the others, whose drafts must not depend on other namespaces' requests."""
        self._live = 0
        self._undecided: dict[int, RequestRoute] = {}

    # ------------------------------------------------------------------------------------------------ choosing

    def opened(self, sequence: Sequence, parts: list[Any]) -> RequestRoute:
        routes = self.routes if sequence.params.greedy and sequence.timed else self.sampled_routes.open(sequence)
        prompt = sequence.tokens[: sequence.prompt_length]
        return RequestRoute(sequence, parts, numbers=self.features.of(prompt), routes=routes)

    def begin(self, sequence: Sequence) -> RequestRoute:
        state = self.opened(sequence, [None] * len(self.parts))
        before = self._batch
        self._live += 1
        self._undecided[id(state)] = state
        try:
            for one in self._undecided.values() if self._batch != before else [state]:
                one.odds = one.routes.odds(one.numbers, self._batch, _context(one.sequence.prompt_length), self.explore)
        except BaseException:  # interrupted while measuring: the request does not join
            self.end(state)
            raise
        return state

    @property
    def _batch(self) -> int:
        """Requests that are expected to share a round: a power of two, so that few costs are measured."""
        return _power_of_two(self._live)

    def expected_seconds(self, prompt: Seq[int], length: int, *, greedy: bool) -> float:
        routes = self.routes if greedy else self._make(False)
        batch, context, costs = _power_of_two(self._live + 1), _context(len(prompt)), self._target.costs
        expected, _ = routes.speedups(self.features.of(prompt), batch, context)
        return costs.seconds(len(prompt)) + length * costs.even(batch, batch, context) / max(expected)

    def _decided(self, state: RequestRoute) -> int:
        """The part of a request; it begins now where none had been chosen."""
        if state.drafting is None:
            index = self._drawn(state)
            state.parts[index] = self.parts[index].begin(state.sequence)
            state.drafting = index  # not before: a part that fails to begin has nothing to end
            del self._undecided[id(state)]
        return state.drafting

    def _drawn(self, state: RequestRoute) -> int:
        import torch

        possible = [at for at, odds in enumerate(state.odds) if odds > 0.0]
        if len(possible) == 1:
            return possible[0]
        # One number, of a stream that nobody else draws from, and of a position before the answer.
        chance = state.sequence.chance.at(state.sequence.prompt_length, f"{self.purpose}/route")
        return possible[chance.categorical(torch.tensor([state.odds[at] for at in possible], dtype=torch.float64))]

    def _by_part(self, states: Seq[RequestRoute]) -> dict[int, list[int]]:
        """Places of the requests of each part."""
        found: dict[int, list[int]] = {}
        for at, state in enumerate(states):
            found.setdefault(self._decided(state), []).append(at)
        return found

    def measure(self, batch: int, *, sampled: bool | None = None) -> None:
        super().measure(batch, sampled=sampled)
        for context in CONTEXTS:
            self.routes.odds([1.0] + [0.0] * (len(FEATURES) - 1), batch, context, self.explore)

    # ------------------------------------------------------------------------------------------------- drafting

    def on_prefill(self, state: RequestRoute, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        index = self._decided(state)
        part = self.parts[index]
        if part.prefill_layers:
            part.on_prefill(
                state.parts[index], position, {layer: hidden_states[layer] for layer in part.prefill_layers}
            )

    def propose_batch(self, states: Seq[RequestRoute], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = [TokenTree() for _ in states]
        for index, members in self._by_part(states).items():
            began = perf_counter()
            drafted = self.ask(index, [states[at] for at in members], [budgets[at] for at in members])
            spent = perf_counter() - began
            for at, tree in zip(members, drafted, strict=True):
                trees[at], state = tree, states[at]
                # A first draft reads the prompt, which no later one does.
                state.drafted_in = spent if tree.tokens and state.rounds[self.names[index]] else None
                state.rounds[self.names[index]] += len(tree) > 0
        return trees

    def draft_steps(self, states: Seq[RequestRoute]) -> float:
        return sum(
            self.parts[index].draft_steps([states[at].parts[index] for at in members])
            for index, members in self._by_part(states).items()
        )

    def observe_batch(self, states: Seq[RequestRoute], verdicts: Seq[Verdict]) -> None:
        # A part that begins here has the round's tokens already.
        began = {id(state) for state in states if state.drafting is None}
        for index, members in self._by_part(states).items():
            seen = [at for at in members if id(states[at]) not in began]
            since = perf_counter()
            self.parts[index].observe_batch([states[at].parts[index] for at in seen], [verdicts[at] for at in seen])
            timed = [one for at in members if (one := states[at].drafted_in) is not None]
            running = [states[at].sequence for at in members]
            live = all(one.params.greedy and one.timed and not one.replayed for one in running)
            if live and len(timed) == len(members):
                self.routes.clocks[index].read(len(members), timed[0] + perf_counter() - since)
        for state, verdict in zip(states, verdicts, strict=True):
            state.drafted_in = None  # a round that rests has drafted nothing
            tree, kept = verdict.scores.tree, len(verdict.committed)
            depth = max(tree.depths) if tree.depths else 0
            state.shown.count_round(len(tree), min(len(verdict.path), kept), kept, depth)
            state.levels += depth

    def rewind(self, state: RequestRoute, sequence: Sequence, kept: int) -> RequestRoute:
        state.sequence, index = sequence, state.drafting
        if index is not None:
            state.parts[index] = self.parts[index].rewind(state.parts[index], sequence, kept)
        return state

    def caches(self, state: RequestRoute) -> tuple[CacheUse, ...]:
        index = state.drafting
        if index is None:
            return ()
        uses = self.parts[index].caches(state.parts[index])
        return tuple(replace(use, name=f"{self.names[index]}: {use.name}") for use in uses)

    def end(self, state: RequestRoute) -> None:
        self._live -= 1
        self._undecided.pop(id(state), None)
        index = state.drafting
        if index is None:
            return
        known = state.routes.estimates[index]
        if known is not None:
            known.learn(state.numbers, state.shown, state.levels)
        self.parts[index].end(state.parts[index])


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _context(prompt: int) -> int:
    """How many tokens a request of this prompt has, nearly: costs change little in between."""
    return _power_of_two(prompt)

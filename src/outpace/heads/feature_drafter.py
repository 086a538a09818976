"""Drafters that read the target's hidden states and go on from their own: what the EAGLE family shares at decoding.

A draft grows level by level from the rows of committed tokens (:mod:`outpace.heads.committed_rows`): the state that
leaves a row enters the rows of the tokens that are drafted after it. Rows of drafted tokens are never kept.

A request drafts nothing in rounds before which the hidden state of a committed token is missing: that of a prompt of
one token, or of tokens long before those that the request was rewound to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.calibration import Calibration, Prior
from outpace.drafting.namespaces import Namespaces
from outpace.engine.rehearsal import draft_seconds
from outpace.heads.committed_rows import CHUNK, CommittedRows, make_roots, make_rows
from outpace.heads.feature_net import Net
from outpace.heads.head_runner import Rows
from outpace.targets.base import Sequence, Target

SHORT = 8
"""So many rows of the past may get logits of which only the last are read: cheaper than another forward."""
LEVEL_COST = 0.05
"""The cost of a level where none was measured, in autoregressive steps."""
_LEVELS, _CHILDREN = 3, 4
"""Levels of a draft that is made to measure them, and their rows."""


class CandidateTree(Protocol):
    """One draft under construction."""

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        """Logits (n, Vd) of the rows that were asked for, the root's at first. The rows to run next, as (row they
        follow, token): rows are counted from 1 as they are run, 0 is the root. Empty: the draft is complete."""
        ...

    def tree(self) -> TokenTree:
        """The draft."""
        ...

    def learn(self, committed: Seq[int], target_row: Callable[[int], Tensor] | None = None) -> None:
        """What was committed after the token that it grew from. ``target_row(i)``: the target's distribution, (V,),
        after i committed tokens; None at temperature 0."""
        ...


@dataclass(slots=True)
class FeatureState(CommittedRows):
    """What a feature drafter keeps of one request. ``candidates``: this round's draft, once it was begun."""

    calibration: Calibration = field(kw_only=True)
    candidates: CandidateTree | None = None


@dataclass(slots=True)
class _LevelRows:
    """A draft that is being run. Row 0 is the root, at position ``root_position``; ``seen``: rows on the path to each.

    ``states`` (rows, hidden): what left them; ``logits``: those of the rows run last; ``side``: K/V of all but the
    root.
    """

    state: FeatureState
    candidates: CandidateTree
    root_position: int
    states: Tensor
    logits: Tensor
    seen: list[list[int]] = field(default_factory=lambda: [[]])
    positions: list[int] = field(default_factory=list)
    side: Any = None

    def next_level(self, net: Net, wanted: list[tuple[int, int]]) -> Rows:
        """Rows of drafted tokens, (row that each follows, token). Each sees the committed rows, its path and itself."""
        old, old_positions = len(self.positions), list(self.positions)
        parents = [parent for parent, _ in wanted]
        for parent in parents:
            path = [*self.seen[parent], len(self.seen) - 1]
            self.seen.append(path)
            self.positions.append(self.root_position + len(path))
        states = self.states[parents] if len(parents) > 1 else self.states[parents[0] : parents[0] + 1]
        tokens = [token for _, token in wanted]
        found = net.entering(tokens, states, known=False)
        seen, positions = self.seen[1 + old :], self.positions[old:]
        beside = tokens if found.beside else ()
        return Rows(self.state.kv, found.states, positions, beside, seen, self.side, old_positions, found.entry)


class FeatureDrafter(Drafter[FeatureState]):
    """Keeps the head's K/V in step with the requests, and runs the levels of their drafts, all requests together.

    ``prior``: acceptance rates by kind of candidate before any were observed.
    """

    needs_target_internals = True

    def __init__(self, net: Net, proposal: Proposal, prior: Prior) -> None:
        self.net = net
        self.aux_hidden_state_layers = net.aux_hidden_state_layers
        self.proposal = proposal
        self._calibrations = Namespaces(lambda: Calibration(prior))
        self._level_cost = LevelCost(net.target, f"level of {type(net).__name__} {net.fingerprint}", self._rehearse)

    @abstractmethod
    def start(self, state: FeatureState, budget: Budget, level_cost: float) -> CandidateTree:
        """Begin a draft. ``level_cost``: what running a level costs, in autoregressive steps."""

    def _rehearse(self) -> None:
        draft_seconds(self.net.target, self, Fixed(_LEVELS, topk=_CHILDREN, max_nodes=_LEVELS * _CHILDREN))

    def begin(self, sequence: Sequence) -> FeatureState:
        runner = self.net.runner
        return FeatureState(sequence, runner, runner.open(), calibration=self._calibrations.open(sequence))

    @torch.inference_mode()
    def on_prefill(self, state: FeatureState, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        state.put(position, torch.cat([hidden_states[layer] for layer in self.aux_hidden_state_layers], -1))
        if state.waiting > SHORT:  # a prompt's rows belong to its prefill, and not to the first draft
            make_rows(self.net, [state])

    @torch.inference_mode()
    def propose_batch(self, states: Seq[FeatureState], budgets: Seq[Budget]) -> list[TokenTree]:
        ready = []
        for state, budget in zip(states, budgets, strict=True):
            state.candidates = None
            if state.complete and budget.depth > 0 and budget.max_nodes > 0 and budget.topk > 0:
                ready.append((state, budget))
        self._catch_up([state for state, _ in ready])
        drafts = []
        for state, budget in ready:
            assert state.root is not None
            cost = self._level_cost.of(state.sequence, len(states)) if budget.relative_costs else 0.0
            state.candidates = self.start(state, budget, cost)
            drafts.append(_LevelRows(state, state.candidates, len(state.sequence.tokens) - 2, *state.root))
        self._run(drafts)
        return [TokenTree() if one.candidates is None else one.candidates.tree() for one in states]

    def _catch_up(self, states: Seq[FeatureState]) -> None:
        """Rows of all committed tokens, and what leaves the last one."""
        behind = [state for state in states if state.root is None]
        make_rows(self.net, [state for state in behind if state.waiting > SHORT])
        if behind:
            make_roots(self.net, behind)

    def _run(self, drafts: list[_LevelRows]) -> None:
        """A level of every draft at a time, until all are complete."""
        while True:
            began = perf_counter()
            wanted = [(draft, rows) for draft in drafts if (rows := draft.candidates.take(draft.logits))]
            if not wanted:
                return
            drafts = [draft for draft, _ in wanted]
            outs = self.net.run([draft.next_level(self.net, rows) for draft, rows in wanted])
            for draft, out in zip(drafts, outs, strict=True):
                assert out.logits is not None
                draft.states = torch.cat([draft.states, out.states])
                draft.logits, draft.side = out.logits, out.side
            self._level_cost.measured(perf_counter() - began)

    @torch.inference_mode()
    def observe(self, state: FeatureState, verdict: Verdict) -> None:
        state.put(verdict.scores.length - 1, verdict.hidden_states(self.aux_hidden_state_layers))
        if state.waiting > CHUNK:
            make_rows(self.net, [state])
        if state.candidates is not None:
            state.candidates.learn(verdict.committed, None if state.sequence.params.greedy else verdict.target_row)
            state.candidates = None

    def rewind(self, state: FeatureState, sequence: Sequence, kept: int) -> FeatureState:
        # The newest token's hidden state is not known, and rows before replaced tokens are wrong.
        known = min(kept, len(sequence.tokens) - 1)
        if known < state.known or state.next >= kept:
            state.cut(known)
        state.candidates = None
        return state

    def end(self, state: FeatureState) -> None:
        self.net.runner.close(state.kv)


class LevelCost:
    """Costs of a level in autoregressive steps of ``target``.

    Greedy requests go by the time that levels take now. Sampled ones, whose answers must not depend on the clock, go by
    what ``rehearse`` gave when it was first called on this machine, kept with the target's costs under ``name``.
    """

    def __init__(self, target: Target, name: str, rehearse: Callable[[], None]) -> None:
        self._target, self._name, self._rehearse = target, name, rehearse
        self._seconds = 0.0
        self._rehearsing = False

    def measured(self, seconds: float) -> None:
        """One level took so long."""
        # Some levels are interrupted: what is usual counts, not the mean.
        self._seconds = seconds if not self._seconds else min(1.1 * self._seconds, 0.9 * self._seconds + 0.1 * seconds)

    def of(self, sequence: Sequence, batch: int) -> float:
        """The cost of a level for one of ``batch`` requests."""
        if self._rehearsing or (sequence.params.greedy and not self._seconds):
            return LEVEL_COST
        return min(1.0, self._target.costs.steps(lambda: self._usual(sequence), LEVEL_COST, batch))

    def _usual(self, sequence: Sequence) -> float:
        return self._seconds if sequence.params.greedy else self._target.costs.once(self._name, self._rehearsed)

    def _rehearsed(self) -> float:
        live, self._seconds, self._rehearsing = self._seconds, 0.0, True
        try:
            self._rehearse()
            return self._seconds
        finally:
            self._seconds, self._rehearsing = live, False

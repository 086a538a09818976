"""Drafters that read the target's hidden states and go on from their own: what the EAGLE family shares at decoding.

A draft grows level by level from the rows of committed tokens (:mod:`outpace.heads.committed_rows`): the state that
leaves a row enters the rows of the tokens that are drafted after it. Rows of drafted tokens are never kept.

Of a long text only the newest tokens are read, where ``recent_tokens`` says so: one layer of attention finds little
that helps it further back, and reading all takes longer than a round of the target does.

A request drafts nothing in rounds before which the hidden state of a committed token is missing: that of a prompt of
one token, or of tokens long before those that the request was rewound to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.calibration import Calibration, Prior
from outpace.drafting.candidate_tree import CandidateTree
from outpace.drafting.namespaces import Namespaces
from outpace.engine.rehearsal import draft_seconds, recorded_as
from outpace.heads.committed_rows import CHUNK, CommittedRows, make_rows
from outpace.heads.feature_net import Net
from outpace.heads.level_cost import LevelCost
from outpace.targets.base import Sequence
from outpace.targets.branches import Branches
from outpace.targets.side_by_side import Gathered, gather, rows_of_rounds

SHORT = 8
"""So many rows of the past may get logits of which only the last are read: cheaper than another forward."""
_WAITING = 32 << 20
"""Bytes of a prompt's hidden states that may wait."""
_UNREAD = 512
"""Forwards whose hidden states a request may leave unread: so long the scores of their batches are kept. More than a
draft reads (``recent_tokens``), else they would be read for nobody."""
_LEVELS, _CHILDREN = 3, 2
"""Levels of a draft that is made to measure them, and their rows: about as many as sampled drafts have."""


class _Unread(NamedTuple):
    """Hidden states of committed tokens from ``position`` on, of a prefill or a round: ``rows`` of each layer's."""

    position: int
    hidden_states: Mapping[int, Tensor]
    rows: Seq[int]

    @property
    def stop(self) -> int:
        """The position behind them."""
        return self.position + len(self.rows)


@dataclass(slots=True)
class FeatureState(CommittedRows):
    """What a feature drafter keeps of one request. ``candidates``: this round's draft, once it was begun."""

    calibration: Calibration = field(kw_only=True)
    candidates: CandidateTree | None = None
    unread: list[_Unread] = field(default_factory=list)
    """Hidden states that have not been copied yet: of most requests in a batch nobody asks for a draft."""
    unread_bytes: int = 0
    """Of a prompt's among them."""

    def skip_old(self, most: int | None) -> None:
        """Leave out what is unread but for the newest ``most`` positions; None: nothing. Rows of positions before such
        a gap are of no use: they go when those behind it are read."""
        if most is None or not self.unread:
            return
        start = self.unread[-1].stop - most
        while self.unread[0].stop <= start:
            self.unread.pop(0)
        first = self.unread[0]
        if first.position < start:
            self.unread[0] = _Unread(start, first.hidden_states, first.rows[start - first.position :])

    def skip_from(self, position: int) -> None:
        """Leave out what is unread from ``position`` on."""
        while self.unread and self.unread[-1].position >= position:
            self.unread.pop()
        if self.unread and self.unread[-1].stop > position:
            last = self.unread[-1]
            self.unread[-1] = _Unread(last.position, last.hidden_states, last.rows[: position - last.position])


class FeatureDrafter(Drafter[FeatureState]):
    """Keeps the head's K/V in step with the requests, and runs the levels of their drafts, all requests together.

    ``prior``: acceptance rates by kind of candidate before any were observed. ``recent_tokens``: how many tokens of a
    text are read before a draft, at most, the newest; None: all.
    """

    needs_target_internals = True
    asks_policy = True
    weighs_costs = True

    def __init__(self, net: Net, proposal: Proposal, prior: Prior, recent_tokens: int | None = None) -> None:
        self.net = net
        self.recent_tokens = recent_tokens
        self.aux_hidden_state_layers = net.aux_hidden_state_layers
        self.proposal = proposal
        self._calibrations = Namespaces(lambda: Calibration(prior))
        self._branches: list[Branches] = []
        """Those that no draft uses now."""
        self._level_cost = LevelCost(
            net.target, recorded_as(f"small level of {type(net).__name__} {net.fingerprint}"), self._rehearse
        )

    @abstractmethod
    def start(self, state: FeatureState, budget: Budget, level_cost: float) -> CandidateTree:
        """Begin a draft. ``level_cost``: what running a level costs, in autoregressive steps."""

    def _rehearse(self) -> None:
        draft_seconds(
            self.net.target, self, Fixed(_LEVELS, topk=_CHILDREN, max_nodes=_LEVELS * _CHILDREN), sampled=True
        )

    def begin(self, sequence: Sequence) -> FeatureState:
        runner = self.net.runner
        return FeatureState(sequence, runner, runner.open(), calibration=self._calibrations.open(sequence))

    def on_prefill(self, state: FeatureState, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        layers = {layer: hidden_states[layer] for layer in self.aux_hidden_state_layers}
        rows, size = len(next(iter(layers.values()))), sum(one.nbytes for one in layers.values())
        state.unread.append(_Unread(position, layers, range(rows)))
        state.unread_bytes += size
        if self.recent_tokens is not None and rows:
            state.skip_old(self.recent_tokens)
            state.unread_bytes = min(state.unread_bytes, self.recent_tokens * (size // rows))
        if state.unread_bytes + state.waiting_bytes > _WAITING:
            self._read([state])

    def observed_layers(self, states: Seq[FeatureState], idle: int) -> Seq[int]:
        # Each round has a token or more, and no more are read.
        return () if self.recent_tokens is not None and idle >= self.recent_tokens else self.aux_hidden_state_layers

    def ready(self, state: FeatureState) -> bool:
        known = state.unread[-1].stop if state.unread else state.known
        return known == len(state.sequence.tokens) - 1

    @torch.inference_mode()
    def propose_batch(self, states: Seq[FeatureState], budgets: Seq[Budget]) -> list[TokenTree]:
        self._read([state for state, budget in zip(states, budgets, strict=True) if budget.depth > 0])
        ready, drafts, costs = list[FeatureState](), list[CandidateTree](), dict[bool, float]()
        live = all(state.sequence.timed for state in states)  # as the budgets of a batch
        context = max([len(state.sequence.tokens) for state in states], default=0)
        for state, budget in zip(states, budgets, strict=True):
            state.candidates = None
            if state.complete and budget.depth > 0 and budget.max_nodes > 0 and budget.topk > 0:
                sampled = not state.sequence.params.greedy
                if budget.relative_costs and sampled not in costs:
                    batch = max(len(states), int(budget.base_tokens))
                    costs[sampled] = self._level_cost.of(
                        len(states), batch, 1 << context.bit_length(), live=live, sampled=sampled
                    )
                cost = costs[sampled] if budget.relative_costs else 0.0
                state.candidates = self.start(state, budget, cost)
                ready.append(state)
                drafts.append(state.candidates)
        if ready:
            make_rows(self.net, [state for state in ready if state.waiting > SHORT])
            # Not one for all: a request's processor may generate with the same drafter meanwhile.
            branches = self._branches.pop() if self._branches else self.net.branches()
            sampled = any(not state.sequence.params.greedy for state in ready)
            self._level_cost.measured(
                branches.draft([state.root(self.net) for state in ready], drafts), sampled=sampled
            )
            self._branches.append(branches)
            for state in ready:
                state.forget_old()
        return [TokenTree() if one.candidates is None else one.candidates.tree() for one in states]

    def observe_batch(self, states: Seq[FeatureState], verdicts: Seq[Verdict]) -> None:
        for state, verdict in zip(states, verdicts, strict=True):
            scores = verdict.scores
            if all(layer in scores.hidden_states for layer in self.aux_hidden_state_layers):
                state.unread.append(_Unread(scores.length - 1, scores.hidden_states, verdict.rows))
            else:  # nor will what came before be read, which holds states of whole batches
                state.unread.clear()
                state.unread_bytes = 0
            if state.candidates is not None:
                state.candidates.learn(verdict.committed, None if state.sequence.params.greedy else verdict.target_row)
                state.candidates = None
            if self.recent_tokens is not None and len(state.unread) > self.recent_tokens:
                state.skip_old(self.recent_tokens)
        if full := [state for state in states if len(state.unread) >= _UNREAD]:
            self._read(full)

    def rested(self, states: Seq[FeatureState], verdicts: Seq[Verdict]) -> None:
        for state in states:
            if state.unread:
                state.unread.clear()
                state.unread_bytes = 0

    @torch.inference_mode()
    def _read(self, states: Seq[FeatureState]) -> None:
        """Keep the hidden states that have not been read."""
        wanted = list[Gathered]()
        for state in states:
            state.skip_old(self.recent_tokens)
            for number, block in enumerate(_blocks(state.unread)):
                if number:  # the memory of those before it may move
                    gather(wanted)
                    wanted = []
                rounds = [(one.hidden_states, one.rows) for one in block]
                room = partial(state.room, block[0].position)
                wanted += rows_of_rounds(rounds, self.aux_hidden_state_layers, room)
            state.unread.clear()
            state.unread_bytes = 0
        gather(wanted)
        many = [state for state in states if state.waiting > CHUNK or state.waiting_bytes > _WAITING]
        make_rows(self.net, [state for state in many if state.waiting > 1])

    def observe(self, state: FeatureState, verdict: Verdict) -> None:
        self.observe_batch([state], [verdict])

    def rewind(self, state: FeatureState, sequence: Sequence, kept: int) -> FeatureState:
        # The newest token's hidden state is not known, and rows before replaced tokens are wrong.
        known = min(kept, len(sequence.tokens) - 1)
        state.skip_from(known)
        self._read([state])
        if known < state.known or state.next >= kept:
            state.cut(known)
        state.candidates = None
        return state

    def end(self, state: FeatureState) -> None:
        self.net.runner.close(state.kv)


def _blocks(unread: Seq[_Unread]) -> list[list[_Unread]]:
    """Those that continue one another, together."""
    blocks = list[list[_Unread]]()
    for one in unread:
        if blocks and blocks[-1][-1].stop == one.position:
            blocks[-1].append(one)
        else:
            blocks.append([one])
    return blocks

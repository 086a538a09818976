"""Drafters that read the target's hidden states and go on from their own: what the EAGLE family shares at decoding.

A row holds a token and the state of the token before it. Rows of committed tokens are made from the target's own states
and kept; they are what a request's K/V in the drafter's layers hold, and nothing that was drafted is. A draft grows
level by level: the state that leaves a row enters the rows of the tokens that are drafted after it.

States that are not yet rows wait until the next proposal, where all requests catch up in one forward, whose last rows
give the first level its logits. A request whose past is not known (a prompt of one token, or one that was rewound far)
drafts nothing until the target has been asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.proposal import Proposal
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.heads.feature_net import Net
from outpace.heads.head_runner import Rows
from outpace.targets.base import Sequence, Target, TreeScores

CHUNK = 512
"""Rows of the past that are run at once, and states that may wait."""
RECENT = 32
"""States that are remembered behind the last row, for requests that are rewound by a few tokens."""
SHORT = 8
"""So many rows of the past may get logits of which only the last are read: cheaper than another forward."""


class CandidateTree(Protocol):
    """One draft under construction."""

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        """Logits (n, Vd) of the rows that were asked for, the root's at first. The rows to run next, as (row they
        follow, token): rows are counted from 1 as they are run, 0 is the root. Empty: the draft is complete."""
        ...

    def tree(self) -> TokenTree:
        """The draft."""
        ...

    def learn(self, committed: Seq[int]) -> None:
        """What was committed after the token that it grew from."""
        ...


Start = Callable[[Sequence, Budget, float], CandidateTree]
"""Starts a draft. The number is what a level costs, in plain steps."""


@dataclass(slots=True)
class _Track:
    """One request. Row i of ``kv`` is made from the state at position ``first + i`` and the token after it.

    ``root``: what left the last row, (1, hidden), and its logits (1, Vd), while that is the row of the last committed
    token.
    """

    kv: Any
    first: int = 0
    since: int = 0
    pieces: list[Tensor] = field(default_factory=list)
    """The states as they came: joined when they are wanted, and not in every round that nothing is drafted in."""
    root: tuple[Tensor, Tensor] | None = None

    @property
    def states(self) -> Tensor | None:
        """(m, taps * hidden): of positions from ``since`` on, some of them rows already."""
        if len(self.pieces) > 1:
            self.pieces = [torch.cat(self.pieces)]
        return self.pieces[0] if self.pieces else None

    @property
    def known(self) -> int:
        """States are known of positions before this one."""
        return self.since + sum(map(len, self.pieces))


@dataclass(slots=True)
class _Draft:
    """A draft that is being run: ``states`` (1 + rows, hidden) of root and rows, which see ``seen``."""

    track: _Track
    candidates: CandidateTree
    at: int
    """Position of the state before the root."""
    states: Tensor
    logits: Tensor
    seen: list[list[int]]
    positions: list[int]
    side: Any = None


class FeatureDrafter(Drafter):
    """Keeps the drafter's K/V in step with the requests, and runs what growers ask for, all requests together."""

    needs_whole = True

    def __init__(self, net: Net, start: Start, proposal: Proposal) -> None:
        self.net = net
        self.aux_hidden_state_layers = net.aux_hidden_state_layers
        self.proposal = proposal
        self._start = start
        self._tracks: dict[Sequence, _Track] = {}
        self._candidate_trees: dict[Sequence, tuple[CandidateTree, int]] = {}
        self._pace = _Pace(net.target)

    # ------------------------------------------------------------------------------------------ what is kept

    def begin(self, sequence: Sequence) -> None:
        self._tracks[sequence] = _Track(self.net.runner.open())

    @torch.inference_mode()
    def on_prefill(self, sequence: Sequence, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        self._supply(sequence, position, self._joined(hidden_states))
        track = self._tracks[sequence]
        if self._waiting(track) > SHORT:  # a prompt's rows belong to its prefill, and not to the first draft
            self._absorb([(sequence, track)])

    def _joined(self, hidden_states: Mapping[int, Tensor]) -> Tensor:
        """States of all taps side by side, copied. They are fused when they become rows: many need never be."""
        return torch.cat([hidden_states[layer] for layer in self.aux_hidden_state_layers], -1)

    def _supply(self, sequence: Sequence, position: int, states: Tensor) -> None:
        """The target's states from ``position`` on have become known."""
        track = self._tracks[sequence]
        if position < track.known:
            self._cut(track, position)
        if not track.pieces or position > track.known:
            self._forget(track)
            track.first = track.since = position
        track.pieces.append(states)
        track.root = None
        if self._waiting(track) > CHUNK:
            self._absorb([(sequence, track)])

    def _waiting(self, track: _Track) -> int:
        """States that are no rows yet."""
        return track.known - track.first - self.net.runner.length(track.kv)

    def _absorb(self, tracks: Seq[tuple[Sequence, _Track]]) -> None:
        """Make rows of the states that wait, all but the last of each: that row's logits will be wanted."""
        while tracks:
            self.net.run(self._past([(s, t, min(CHUNK, self._waiting(t) - 1)) for s, t in tracks]), logits=False)
            for _, track in tracks:
                self._trim(track)
            tracks = [(s, t) for s, t in tracks if self._waiting(t) > 1]

    def _past(self, wanted: Seq[tuple[Sequence, _Track, int]]) -> list[Rows]:
        """The next so many rows of committed tokens of each."""
        places, tokens, states = [], list[int](), list[Tensor]()
        for sequence, track, count in wanted:
            assert track.states is not None
            at = track.first + self.net.runner.length(track.kv)
            places.append(range(at, at + count))
            tokens += sequence.tokens[at + 1 : at + 1 + count]
            states.append(track.states[at - track.since : at - track.since + count])
        found = self.net.entering(tokens, states[0] if len(states) == 1 else torch.cat(states), known=True)
        rows, start = [], 0
        for (_, track, count), where in zip(wanted, places, strict=True):
            mine = slice(start, start + count)
            beside = tokens[mine] if found.beside else ()
            rows.append(Rows(track.kv, found.states[mine], list(where), beside, entry=found.entry))
            start += count
        return rows

    def _trim(self, track: _Track) -> None:
        """Forget states that have long been rows. The rest is copied: a slice would hold on to all of them."""
        spare = track.first + self.net.runner.length(track.kv) - RECENT - track.since
        if spare >= RECENT and track.states is not None:
            track.pieces = [track.states[spare:].clone()]
            track.since += spare

    def _cut(self, track: _Track, known: int) -> None:
        """States of positions from ``known`` on are wrong, and so are rows made from them or before other tokens."""
        if track.states is None:
            return
        rows = max(0, min(self.net.runner.length(track.kv), known - 1 - track.first))
        if known <= track.first or track.first + rows < track.since:
            self._forget(track)
            return
        track.kv = self.net.runner.truncate(track.kv, rows)
        track.pieces = [track.states[: known - track.since]]
        track.root = None

    def _forget(self, track: _Track) -> None:
        if self.net.runner.length(track.kv):
            track.kv = self.net.runner.truncate(track.kv, 0)
        track.first = track.since = 0
        track.pieces, track.root = [], None

    # --------------------------------------------------------------------------------------------- drafting

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        ready = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            self._candidate_trees.pop(sequence, None)
            track = self._tracks[sequence]
            known = track.states is not None and track.known == len(sequence.tokens) - 1
            if known and budget.depth > 0 and budget.nodes > 0 and budget.width > 0:
                ready.append((sequence, budget, track))
        self._catch_up([(sequence, track) for sequence, _, track in ready])
        drafts = []
        for sequence, budget, track in ready:
            assert track.root is not None
            relative_cost = self._pace.of(sequence, len(sequences)) if budget.relative_costs else 0.0
            candidates = self._start(sequence, budget, relative_cost)
            self._candidate_trees[sequence] = candidates, len(sequence.tokens)
            drafts.append(_Draft(track, candidates, len(sequence.tokens) - 2, *track.root, [[]], []))
        self._grow(drafts)
        return [
            self._candidate_trees[one][0].tree() if one in self._candidate_trees else TokenTree() for one in sequences
        ]

    def _catch_up(self, tracks: Seq[tuple[Sequence, _Track]]) -> None:
        """Rows of all committed tokens, and what leaves the last one."""
        behind = [one for one in tracks if one[1].root is None]
        self._absorb([one for one in behind if self._waiting(one[1]) > SHORT])
        if not behind:
            return
        outs = self.net.run(self._past([(*one, self._waiting(one[1])) for one in behind]))
        for (_, track), out in zip(behind, outs, strict=True):
            assert out.logits is not None
            track.root = out.states[-1:], out.logits[-1:]
            self._trim(track)

    def _grow(self, drafts: list[_Draft]) -> None:
        """A level at a time, until every grower has enough."""
        while True:
            began = perf_counter()
            batch, growing = [], []
            for draft in drafts:
                wanted = draft.candidates.take(draft.logits)
                if wanted:
                    batch.append(self._level(draft, wanted))
                    growing.append(draft)
            if not batch:
                return
            for draft, out in zip(growing, self.net.run(batch), strict=True):
                assert out.logits is not None
                draft.states = torch.cat([draft.states, out.states])
                draft.logits, draft.side = out.logits, out.side
            drafts = growing
            self._pace.spent(perf_counter() - began)

    def _level(self, draft: _Draft, wanted: list[tuple[int, int]]) -> Rows:
        """Rows of drafted tokens. Each sees what was kept, the rows before it on its path and itself."""
        old, old_positions = len(draft.positions), list(draft.positions)
        parents = [parent for parent, _ in wanted]
        for parent in parents:
            path = [*draft.seen[parent], len(draft.seen) - 1]
            draft.seen.append(path)
            draft.positions.append(draft.at + len(path))
        states = draft.states[parents] if len(parents) > 1 else draft.states[parents[0] : parents[0] + 1]
        tokens = [token for _, token in wanted]
        found = self.net.entering(tokens, states, known=False)
        seen, positions = draft.seen[1 + old :], draft.positions[old:]
        beside = tokens if found.beside else ()
        return Rows(draft.track.kv, found.states, positions, beside, seen, draft.side, old_positions, found.entry)

    # --------------------------------------------------------------------------------------- after the verdict

    @torch.inference_mode()
    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        """Take the target's states of what was committed, whoever drafted it."""
        for sequence, scored in zip(sequences, scores, strict=True):
            rows = _rows_of(sequence, scored)
            states = self._joined(_picked(scored.hidden_states, rows))
            self._supply(sequence, scored.length - 1, states)
            candidates, length = self._candidate_trees.pop(sequence, (None, 0))
            if candidates is not None:
                candidates.learn(sequence.tokens[length:])

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        track = self._tracks[sequence]
        copy = _Track(self.net.runner.fork(track.kv), track.first, track.since, list(track.pieces), track.root)
        self._tracks[twin] = copy
        same = min(len(sequence.tokens), len(twin.tokens))
        same = next((at for at in range(same) if sequence.tokens[at] != twin.tokens[at]), same)
        self._rewound(twin, same)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        self._candidate_trees.pop(sequence, None)
        self._rewound(sequence, kept)

    def _rewound(self, sequence: Sequence, kept: int) -> None:
        """Tokens from ``kept`` on are others, or gone: so are states from there on, and that of the last token."""
        track, known = self._tracks[sequence], min(kept, len(sequence.tokens) - 1)
        if known < track.known or self.net.runner.length(track.kv) + track.first >= kept:
            self._cut(track, known)

    def end(self, sequence: Sequence) -> None:
        track = self._tracks.pop(sequence, None)
        self._candidate_trees.pop(sequence, None)
        if track is not None:
            self.net.runner.close(track.kv)


def _picked(hidden_states: Mapping[int, Tensor], rows: list[int]) -> dict[int, Tensor]:
    """These rows of every tap. Often they are the first ones, which need no gathering."""
    if rows[-1] == len(rows) - 1:
        return {layer: states[: len(rows)] for layer, states in hidden_states.items()}
    chosen = torch.tensor(rows)
    return {layer: states.index_select(0, chosen.to(states.device)) for layer, states in hidden_states.items()}


def _rows_of(sequence: Sequence, scored: TreeScores) -> list[int]:
    """Rows of the scores that hold committed tokens: the root and the accepted path. The last token has none yet."""
    rows, node = [0], ROOT
    for token in sequence.tokens[scored.length : len(sequence.tokens) - 1]:
        child = scored.tree.child(node, token)
        if child is None:
            break
        rows.append(1 + child)
        node = child
    return rows


class _Pace:
    """What a level of drafting costs, in plain steps: measured for greedy requests, nominal for sampled ones, whose
    answers must not depend on the clock."""

    NOMINAL = 0.05

    def __init__(self, target: Target) -> None:
        self._target = target
        self._level = 0.0

    def spent(self, seconds: float) -> None:
        """One level took so long."""
        # Some levels are interrupted: what is usual counts, not the mean.
        self._level = seconds if not self._level else min(1.1 * self._level, 0.9 * self._level + 0.1 * seconds)

    def of(self, sequence: Sequence, batch: int) -> float:
        """The price of a level for one of ``batch`` requests."""
        if not sequence.params.greedy or not self._level:
            return self.NOMINAL
        return min(1.0, self._level / self._target.costs.seconds(batch))


__all__ = ["CandidateTree", "FeatureDrafter"]

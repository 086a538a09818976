"""What a feature drafter keeps of one request: rows of committed tokens, and hidden states that are not rows yet.

A row of a drafter of the EAGLE family holds a token and the hidden state of the token before it. Rows of committed
tokens are made from the target's own hidden states, and they alone enter the request's K/V in the drafter's layers.
Hidden states that arrive wait until a draft is wanted; then all requests catch up in one forward.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.drafting.base import DraftState
from outpace.heads.feature_net import Net
from outpace.heads.head_runner import HeadRunner, Rows

CHUNK = 512
"""Most rows of one request that one forward makes."""
RECENT = 32
"""Hidden states that are remembered behind the last row, for requests that are rewound by a few tokens."""


@dataclass(slots=True)
class CommittedRows(DraftState):
    """One request's rows. Row i of ``kv`` is made of the hidden state at position ``first + i`` and the next token.

    ``pieces``: hidden states (n, layers * hidden) of positions from ``since`` on, as they came; some are rows already.
    ``root``: what left the last row, (1, hidden), and its logits (1, Vd), while that is the last committed token's row.
    """

    runner: HeadRunner
    kv: Any
    first: int = 0
    since: int = 0
    pieces: list[Tensor] = field(default_factory=list)
    root: tuple[Tensor, Tensor] | None = None

    @property
    def next(self) -> int:
        """Position of the hidden state that the next row is made of."""
        return self.first + self.runner.length(self.kv)

    @property
    def known(self) -> int:
        """Hidden states are known of positions before this one."""
        return self.since + sum(map(len, self.pieces))

    @property
    def waiting(self) -> int:
        """How many hidden states are not rows yet."""
        return self.known - self.next

    @property
    def complete(self) -> bool:
        """Whether the hidden states of all tokens but the newest are known, and of at least one."""
        return bool(self.pieces) and self.known == len(self.sequence.tokens) - 1

    def hidden_states(self, start: int, stop: int) -> Tensor:
        """Those of the positions from ``start`` to ``stop``, (stop - start, layers * hidden)."""
        if len(self.pieces) > 1:
            self.pieces = [torch.cat(self.pieces)]
        return self.pieces[0][start - self.since : stop - self.since]

    def put(self, position: int, hidden_states: Tensor) -> None:
        """Take the target's hidden states of the tokens from ``position`` on, in place of any known before."""
        if position < self.known:
            self.cut(position)
        if not self.pieces or position > self.known:
            self._clear()
            self.first = self.since = position
        self.pieces.append(hidden_states)
        self.root = None

    def cut(self, known: int) -> None:
        """Forget the hidden states of positions from ``known`` on, and rows that were made of them or before them."""
        if not self.pieces:
            return
        rows = max(0, min(self.runner.length(self.kv), known - 1 - self.first))
        if known <= self.first or self.first + rows < self.since:
            self._clear()
            return
        self.kv = self.runner.truncate(self.kv, rows)
        self.pieces = [self.hidden_states(self.since, known)]
        self.root = None

    def forget_old(self) -> None:
        """Forget hidden states that have long been rows."""
        spare = self.next - RECENT - self.since
        if spare >= RECENT and self.pieces:
            # Copied: a slice would hold on to all of them.
            self.pieces = [self.hidden_states(self.since + spare, self.known).clone()]
            self.since += spare

    def _clear(self) -> None:
        if self.runner.length(self.kv):
            self.kv = self.runner.truncate(self.kv, 0)
        self.first = self.since = 0
        self.pieces, self.root = [], None


def make_rows(net: Net, requests: Seq[CommittedRows]) -> None:
    """Make rows of the hidden states that wait, all but the last of each request: that row's logits will be wanted."""
    while requests:
        net.run(_next_rows(net, [(one, min(CHUNK, one.waiting - 1)) for one in requests]), logits=False)
        for one in requests:
            one.forget_old()
        requests = [one for one in requests if one.waiting > 1]


def make_roots(net: Net, requests: Seq[CommittedRows]) -> None:
    """Make rows of all that waits, each request at least one, in one forward; their last ones become the ``root``."""
    outs = net.run(_next_rows(net, [(one, one.waiting) for one in requests]))
    for one, out in zip(requests, outs, strict=True):
        assert out.logits is not None
        one.root = out.states[-1:], out.logits[-1:]
        one.forget_old()


def _next_rows(net: Net, wanted: Seq[tuple[CommittedRows, int]]) -> list[Rows]:
    """The next so many rows of each request."""
    spans = [(one, one.next, one.next + count) for one, count in wanted]
    tokens = [token for one, start, stop in spans for token in one.sequence.tokens[start + 1 : stop + 1]]
    states = [one.hidden_states(start, stop) for one, start, stop in spans]
    found = net.entering(tokens, states[0] if len(states) == 1 else torch.cat(states), known=True)
    rows, done = [], 0
    for one, start, stop in spans:
        mine = slice(done, done + stop - start)
        done = mine.stop
        beside = tokens[mine] if found.beside else ()
        rows.append(Rows(one.kv, found.states[mine], list(range(start, stop)), beside, entry=found.entry))
    return rows

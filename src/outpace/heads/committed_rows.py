"""What a feature drafter keeps of one request: rows of committed tokens, and hidden states that are not rows yet.

A row of a drafter of the EAGLE family holds a token and the hidden state of the token before it. Rows of committed
tokens are made from the target's own hidden states, and they alone enter the request's K/V in the drafter's layers.
Hidden states that arrive wait until a draft is wanted; then all requests catch up in the forward that drafts
begin with.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outpace.drafting.base import DraftState
from outpace.heads.feature_net import Net
from outpace.heads.head_runner import HeadRunner, Rows
from outpace.heads.known_states import KnownStates
from outpace.targets.branches import Root

CHUNK = 512
"""Most rows of one request that one forward makes."""
RECENT = 32
"""Hidden states that are remembered behind the last row, for requests that are rewound by a few tokens."""


@dataclass(slots=True)
class CommittedRows(DraftState):
    """One request's rows. Row i of ``kv`` is made of the hidden state at position ``first + i`` and the next token.

    ``hidden``: hidden states (layers * hidden,) of consecutive positions; some are rows already.
    """

    runner: HeadRunner
    kv: Any
    first: int = 0
    hidden: KnownStates = field(default_factory=KnownStates)

    @property
    def next(self) -> int:
        """Position of the hidden state that the next row is made of."""
        return self.first + self.runner.length(self.kv)

    @property
    def known(self) -> int:
        """Hidden states are known of positions before this one."""
        return self.hidden.stop

    @property
    def waiting(self) -> int:
        """How many hidden states are not rows yet."""
        return self.known - self.next

    @property
    def waiting_bytes(self) -> int:
        """Their bytes."""
        return self.waiting * self.hidden.row_bytes

    @property
    def complete(self) -> bool:
        """Whether the hidden states of all tokens but the newest are known, and of at least one."""
        return len(self.hidden) > 0 and self.known == len(self.sequence.tokens) - 1

    def room(self, position: int, count: int, layers: Seq[Tensor]) -> Tensor:
        """Memory, (count, layers * hidden), for the target's hidden states of the tokens from ``position`` on, in place
        of any known before. ``layers``: rows of each layer, of the kind that will be written."""
        if position < self.known:
            self.cut(position)
        if not len(self.hidden) or position > self.known:
            self._clear(position)
        return self.hidden.add(count, sum(one.shape[-1] for one in layers), layers[0])

    def cut(self, known: int) -> None:
        """Forget the hidden states of positions from ``known`` on, and rows that were made of them or before them."""
        if not len(self.hidden):
            return
        rows = max(0, min(self.runner.length(self.kv), known - 1 - self.first))
        if known <= self.first or self.first + rows < self.hidden.start:
            self._clear(0)
            return
        self.kv = self.runner.truncate(self.kv, rows)
        self.hidden.cut(known)

    def forget_old(self) -> None:
        """Forget hidden states that have long been rows."""
        if self.next - RECENT - self.hidden.start >= RECENT:
            self.hidden.forget(self.next - RECENT)

    def root(self, net: Net) -> Root:
        """Rows of all that waits, and at least of the last known hidden state, whose row drafts grow from."""
        if not self.waiting:
            self.kv = self.runner.truncate(self.kv, self.runner.length(self.kv) - 1)
        start, stop = self.next, self.known
        tokens = self.sequence.tokens[start + 1 : stop + 1]
        return Root(self.kv, start, net.known(tokens, self.hidden.rows(start, stop)), tokens)

    def _clear(self, position: int) -> None:
        if self.runner.length(self.kv):
            self.kv = self.runner.truncate(self.kv, 0)
        self.first = position
        self.hidden.clear(position)


def make_rows(net: Net, requests: Seq[CommittedRows]) -> None:
    """Make rows of the hidden states that wait, all but the last of each request: that row's logits will be wanted."""
    while requests:
        batch = []
        for one in requests:
            start, stop = one.next, one.next + min(CHUNK, one.waiting - 1)
            tokens = one.sequence.tokens[start + 1 : stop + 1]
            states = net.known(tokens, one.hidden.rows(start, stop))
            beside = tokens if net.reads_tokens else ()
            batch.append(Rows(one.kv, states, list(range(start, stop)), beside, entry=True))
        net.runner.keep(batch)
        for one in requests:
            one.forget_old()
        requests = [one for one in requests if one.waiting > 1]

"""States: hidden states that are kept beside a sequence's K/V, so that a chat's next turn need not compute them.

A drafter that reads the target's states needs those of the whole prompt, and a turn that begins with the K/V of earlier
ones runs no forward over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 256
_UNREAD = 64
"""Rounds whose rows are gathered in one call; until then a round's states stay whole, for all requests of its batch."""


class _Piece(NamedTuple):
    """``rows`` of states by layer, (any, hidden) each."""

    states: Mapping[int, Tensor]
    rows: Seq[int]

    @property
    def in_place(self) -> bool:
        """Whether the rows stand one behind the other."""
        return isinstance(self.rows, range)


class States:
    """Rows of the residual stream entering ``layers``, one for each token of a text, in order.

    Tensors that are added must not change from now on: they are copied when somebody reads them, which may be never.
    """

    def __init__(self, layers: Seq[int]) -> None:
        self.layers = tuple(layers)
        self._count = self._rounds = 0
        self._pieces: list[_Piece] = []

    def add(self, states: Mapping[int, Tensor]) -> None:
        """Append (rows, hidden) by layer; layers that are not kept are ignored."""
        count = len(states[self.layers[0]])
        if not count:
            return
        self._pieces.append(_Piece({layer: states[layer] for layer in self.layers}, range(count)))
        self._count += count

    def add_rows(self, states: Mapping[int, Tensor], rows: Seq[int]) -> None:
        """Append ``rows`` of (any, hidden) by layer."""
        self._pieces.append(_Piece(states, rows))
        self._count += len(rows)
        self._rounds += 1
        if self._rounds >= _UNREAD:
            self._gather()

    def length(self, layers: Seq[int]) -> int:
        """How many tokens have rows of all these layers; 0 where one of the layers is not kept."""
        return self._count if set(layers) <= set(self.layers) else 0

    def first(self, count: int, layers: Seq[int]) -> States:
        """The first ``count`` rows of these layers, which must be among those that are kept."""
        out = States(layers)
        if count:
            out.add(self.rows(0, count))
        return out

    def rows(self, start: int, stop: int) -> dict[int, Tensor]:
        """Those of the tokens from ``start`` to ``stop``, (stop - start, hidden) by layer, in place."""
        at = 0
        for one in self._pieces:
            if at <= start and stop <= at + len(one.rows) and one.in_place:
                first = one.rows[0] - at
                return {layer: one.states[layer][first + start : first + stop] for layer in self.layers}
            at += len(one.rows)
        self._gather()
        self._join()
        return self.rows(start, stop)

    def whole(self) -> dict[int, Tensor]:
        """All rows by layer, (rows, hidden) each, in place; nothing where there are none."""
        return self.rows(0, self._count) if self._count else {}

    def chunks(self) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """All rows in pieces, as a prefill streams them: (position of the first row, (rows, hidden) by layer)."""
        self._gather()
        at = 0
        for count in [len(one.rows) for one in self._pieces]:
            for start in range(at, at + count, _CHUNK):
                yield start, self.rows(start, min(start + _CHUNK, at + count))
            at += count

    def _gather(self) -> None:
        """Copy the rows of rounds in a row into one piece."""
        from outpace.targets.side_by_side import gather, rows_of_rounds

        self._rounds, pieces, self._pieces = 0, self._pieces, []
        for in_place, members in groupby(pieces, lambda one: one.in_place):
            if in_place:
                self._pieces += members
                continue
            blocks: list[Tensor] = []

            def room(count: int, sources: Seq[Tensor], blocks: list[Tensor] = blocks) -> Tensor:
                blocks.append(sources[0].new_empty(count, sum(one.shape[1] for one in sources)))
                return blocks[-1]

            gather(rows_of_rounds(list(members), self.layers, room))
            self._pieces += [_Piece(self._by_layer(one), range(len(one))) for one in blocks]

    def _join(self) -> None:
        """Copy all pieces, which must be in place, into one."""
        import torch

        joined = {
            layer: torch.cat([one.states[layer][one.rows[0] : one.rows[-1] + 1] for one in self._pieces])
            for layer in self.layers
        }
        self._pieces = [_Piece(joined, range(self._count))]

    def _by_layer(self, block: Tensor) -> dict[int, Tensor]:
        return dict(zip(self.layers, block.chunk(len(self.layers), -1), strict=True))

"""States: hidden states that are kept beside a sequence's K/V, so that a chat's next turn need not compute them.

A drafter that reads the target's states needs those of the whole prompt, and a turn that begins with the K/V of earlier
ones runs no forward over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 256
_UNREAD = 64
"""Rounds whose rows are gathered in one call; until then a round's states stay whole, for all requests of its batch."""


class States:
    """Rows of the residual stream entering ``layers``, one for each token of a text, in order."""

    def __init__(self, layers: Seq[int]) -> None:
        self.layers = tuple(layers)
        self._count = 0
        self._pieces: list[Tensor] = []
        """(rows, layers * hidden) each: those of all layers side by side."""
        self._unread: list[tuple[Mapping[int, Tensor], Seq[int]]] = []

    def add(self, states: Mapping[int, Tensor]) -> None:
        """Append a copy of (rows, hidden) by layer; layers that are not kept are ignored."""
        import torch

        self._read()
        self._pieces.append(torch.cat([states[layer] for layer in self.layers], -1))
        self._count += len(self._pieces[-1])

    def add_rows(self, states: Mapping[int, Tensor], rows: Seq[int]) -> None:
        """Append ``rows`` of (any, hidden) by layer, which must not change from now on: they are copied later."""
        self._unread.append((states, rows))
        self._count += len(rows)
        if len(self._unread) >= _UNREAD:
            self._read()

    def length(self, layers: Seq[int]) -> int:
        """How many tokens have rows of all these layers; 0 where one of the layers is not kept."""
        return self._count if set(layers) <= set(self.layers) else 0

    def first(self, count: int, layers: Seq[int]) -> States:
        """A copy of the first ``count`` rows of these layers, which must be among those that are kept."""
        out = States(layers)
        if count:
            out.add(self.rows(0, count))
        return out

    def rows(self, start: int, stop: int) -> dict[int, Tensor]:
        """Those of the tokens from ``start`` to ``stop``, (stop - start, hidden) by layer, in place."""
        import torch

        self._read()
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces)]
        [whole] = self._pieces
        return dict(zip(self.layers, whole[start:stop].chunk(len(self.layers), -1), strict=True))

    def whole(self) -> dict[int, Tensor]:
        """All rows by layer, (rows, hidden) each, in place; nothing where there are none."""
        return self.rows(0, self._count) if self._count else {}

    def chunks(self) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """All rows in pieces, as a prefill streams them: (position of the first row, (rows, hidden) by layer)."""
        for start in range(0, self._count, _CHUNK):
            yield start, self.rows(start, min(start + _CHUNK, self._count))

    def _read(self) -> None:
        """Copy the rows of the rounds that have not been read."""
        if not self._unread:
            return
        from outpace.targets.side_by_side import gather, rows_of_rounds

        rounds, self._unread = self._unread, []
        gather(rows_of_rounds(rounds, self.layers, self._room))

    def _room(self, count: int, sources: Seq[Tensor]) -> Tensor:
        self._pieces.append(sources[0].new_empty(count, sum(one.shape[1] for one in sources)))
        return self._pieces[-1]

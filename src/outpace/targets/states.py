"""States: hidden states that are kept beside a sequence's K/V, so that a chat's next turn need not compute them.

A drafter that reads the target's states needs those of the whole prompt, and a turn that begins with the K/V of earlier
ones runs no forward over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import TYPE_CHECKING

from outpace.targets.hidden_rows import sources

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 256
_UNREAD = 64
"""Rounds whose rows are gathered in one call; until then a round's states stay whole, for all requests of its batch."""


class States:
    """Rows of the residual stream entering ``layers``, one for each token of a text, in order."""

    def __init__(self, layers: Seq[int]) -> None:
        self.layers = tuple(layers)
        self._rows = 0
        self._pieces: dict[int, list[Tensor]] = {layer: [] for layer in self.layers}
        self._unread: list[tuple[Mapping[int, Tensor], Seq[int]]] = []

    def add(self, states: Mapping[int, Tensor]) -> None:
        """Append a copy of (rows, hidden) by layer; layers that are not kept are ignored."""
        self._read()
        for layer in self.layers:
            self._pieces[layer].append(states[layer].clone())  # a view would hold on to the whole batch's
        self._rows += len(states[self.layers[0]])

    def add_rows(self, states: Mapping[int, Tensor], rows: Seq[int]) -> None:
        """Append ``rows`` of (any, hidden) by layer, which must not change from now on: they are copied later."""
        self._unread.append((states, rows))
        self._rows += len(rows)
        if len(self._unread) >= _UNREAD:
            self._read()

    def length(self, layers: Seq[int]) -> int:
        """How many tokens have rows of all these layers; 0 where one of the layers is not kept."""
        return self._rows if set(layers) <= set(self.layers) else 0

    def first(self, count: int, layers: Seq[int]) -> States:
        """A copy of the first ``count`` rows of these layers, which must be among those that are kept."""
        out = States(layers)
        if count:
            out._rows = count
            whole = self.whole()
            out._pieces = {layer: [whole[layer][:count].clone()] for layer in out.layers}
        return out

    def whole(self) -> dict[int, Tensor]:
        """All rows by layer, (rows, hidden) each."""
        import torch

        self._read()
        for layer, pieces in self._pieces.items():
            if len(pieces) > 1:
                self._pieces[layer] = [torch.cat(pieces)]
        return {layer: pieces[0] for layer, pieces in self._pieces.items() if pieces}

    def chunks(self) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """All rows in pieces, as a prefill streams them: (position of the first row, (rows, hidden) by layer)."""
        if self._rows:
            whole = self.whole()
            for start in range(0, self._rows, _CHUNK):
                yield start, {layer: rows[start : start + _CHUNK] for layer, rows in whole.items()}

    def _read(self) -> None:
        """Copy the rows of the rounds that have not been read."""
        if not self._unread:
            return
        from outpace.targets.side_by_side import Gathered, gather

        rounds, self._unread = self._unread, []
        count, wanted = sum(len(rows) for _, rows in rounds), list[Gathered]()
        for layer in self.layers:
            at = 0
            for states, chosen in rounds:
                [source], rows = sources(states, [layer], chosen)
                if not at:
                    self._pieces[layer].append(source.new_empty(count, source.shape[1]))
                wanted.append(Gathered([source], rows, self._pieces[layer][-1][at : at + len(rows)]))
                at += len(rows)
        gather(wanted)

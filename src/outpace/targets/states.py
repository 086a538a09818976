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


class States:
    """Rows of the residual stream entering ``layers``, one for each token of a text, in order."""

    def __init__(self, layers: Seq[int]) -> None:
        self.layers = tuple(layers)
        self._rows = 0
        self._pieces: dict[int, list[Tensor]] = {layer: [] for layer in self.layers}

    def add(self, states: Mapping[int, Tensor]) -> None:
        """Append (rows, hidden) by layer; layers that are not kept are ignored."""
        for layer in self.layers:
            self._pieces[layer].append(states[layer].clone())  # a view would hold on to the whole batch's
        self._rows += len(states[self.layers[0]])

    def length(self, layers: Seq[int]) -> int:
        """How many tokens have rows of all these layers; 0 where one of the layers is not kept."""
        return self._rows if set(layers) <= set(self.layers) else 0

    def first(self, count: int, layers: Seq[int]) -> States:
        """A copy of the first ``count`` rows of these layers, which must be among those that are kept."""
        import torch

        out = States(layers)
        if count:
            out._rows = count
            out._pieces = {layer: [torch.cat(self._pieces[layer])[:count]] for layer in out.layers}
        return out

    def whole(self) -> dict[int, Tensor]:
        """All rows by layer, (rows, hidden) each."""
        import torch

        return {layer: torch.cat(pieces) for layer, pieces in self._pieces.items() if pieces}

    def chunks(self) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """All rows in pieces, as a prefill streams them: (position of the first row, (rows, hidden) by layer)."""
        if self._rows:
            whole = self.whole()
            for start in range(0, self._rows, _CHUNK):
                yield start, {layer: rows[start : start + _CHUNK] for layer, rows in whole.items()}

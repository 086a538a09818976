"""RowsOf: the hidden states of one sequence's rows of a forward, cut out of all rows where somebody reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RowsOf(Mapping[int, "Tensor"]):
    """Rows ``start:stop`` of ``whole``, (all rows, hidden) by layer: of most requests nobody reads them in a round."""

    __slots__ = ("start", "stop", "whole")

    def __init__(self, whole: Mapping[int, Tensor], start: int, stop: int) -> None:
        self.whole, self.start, self.stop = whole, start, stop

    def __getitem__(self, layer: int) -> Tensor:
        return self.whole[layer][self.start : self.stop]

    def __contains__(self, layer: object) -> bool:
        return layer in self.whole  # a mapping's own would cut the rows out

    def __iter__(self) -> Iterator[int]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


def sources(
    hidden_states: Mapping[int, Tensor], layers: Sequence[int], rows: Sequence[int]
) -> tuple[list[Tensor], Sequence[int]]:
    """Tensors that hold the states of ``layers``, and the rows of them that are ``rows`` of the sequence's own."""
    if not isinstance(hidden_states, RowsOf):
        return [hidden_states[layer] for layer in layers], rows
    whole, start = hidden_states.whole, hidden_states.start
    return [whole[layer] for layer in layers], [start + row for row in rows] if start else rows

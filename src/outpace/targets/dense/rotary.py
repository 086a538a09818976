"""Rotary embeddings by table lookup."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

_FIRST_POSITIONS = 2048


class Rotary:
    """Tables of all rotations of a model, (rotations, 2, positions, rotated), grown as positions are met.

    Cosines stand twice side by side and sines once negated, once as they are, so that rotating is one swap of halves
    and two products. Entries are in ``like``'s precision, as transformers has them.
    """

    def __init__(self, rotations: Seq[Callable[[Tensor], tuple[Tensor, Tensor]]], like: Tensor, limit: int) -> None:
        self._rotations, self._like, self._limit = rotations, like, limit
        self._table = like.new_zeros(0)
        self._positions = 0
        self._grow(min(_FIRST_POSITIONS, limit))

    def rows(self, positions: Tensor, highest: int) -> Tensor:
        """(rotations, 2, n, rotated) for ``positions`` (n,), none of them above ``highest``."""
        if highest >= self._positions:
            self._grow(max(highest + 1, min(2 * self._positions, self._limit)))
        return self._table[:, :, positions]

    def _grow(self, positions: int) -> None:
        where = torch.arange(positions)
        made = []
        for rotation in self._rotations:
            cosines, sines = rotation(where)
            made.append(torch.stack([torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)]))
        self._table = torch.stack(made).to(self._like)
        self._positions = positions


def rotated(heads: Tensor, turn: Tensor) -> Tensor:
    """``heads`` (n, heads, head_size) turned by ``turn`` (2, n, rotated); further dimensions pass."""
    width = turn.shape[-1]
    turning = heads[..., :width]
    first, second = turning.chunk(2, -1)
    found = turning * turn[0][:, None] + torch.cat([second, first], -1) * turn[1][:, None]
    return found if width == heads.shape[-1] else torch.cat([found, heads[..., width:]], -1)

"""Rotary position embeddings (RoPE; Su et al. 2021, arXiv 2104.09864), for targets, heads and training alike.

Angles are (cosines, sines), each (..., rotated / 2). Rotating wants them as *turns*, (2, ..., rotated): cosines twice
side by side, and sines once negated, once as they are, so that it takes one swap of halves and two products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

import torch
from torch import Tensor

FIRST_POSITIONS = 2048
"""Positions that tables have from the beginning, where the context is as long; more when they are asked for."""

Angles = tuple[Tensor, Tensor]


def angles(positions: Tensor, head_size: int, theta: float) -> Angles:
    """Plain rotary angles of base ``theta`` for positions (...,): cosines and sines (..., head_size / 2), float32."""
    half = head_size // 2
    speeds = theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    turned = positions.float()[..., None] * speeds
    return turned.cos(), turned.sin()


def turns(found: Angles) -> Tensor:
    """Turns (2, ..., rotated) from angles (..., rotated / 2)."""
    cosines, sines = found
    return torch.stack([torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)])


def rotate(rows: Tensor, turned: Tensor) -> Tensor:
    """``rows`` (..., head_size) rotated by ``turned`` (2, ..., rotated), which broadcasts; further dimensions pass."""
    width = turned.shape[-1]
    turning = rows[..., :width]
    first, second = turning.chunk(2, -1)
    found = turning * turned[0] + torch.cat([second, first], -1) * turned[1]
    return found if width == rows.shape[-1] else torch.cat([found, rows[..., width:]], -1)


class RotaryTable:
    """Turns of all rotations of a model, (rotations, 2, positions, rotated), grown as positions are met.

    ``rotations``: functions from positions (n,) to angles. Entries have the precision and device of ``like``, as
    transformers has them; ``limit``: the context in tokens.
    """

    def __init__(self, rotations: Seq[Callable[[Tensor], Angles]], like: Tensor, limit: int) -> None:
        self._rotations, self._like, self._limit = rotations, like, limit
        self._table = like.new_zeros(0)
        self._positions = 0
        self._grow(min(FIRST_POSITIONS, limit))

    def rows(self, positions: Tensor, highest: int) -> Tensor:
        """(rotations, 2, n, 1, rotated) for ``positions`` (n,), none above ``highest``; they broadcast over heads."""
        if highest >= self._positions:
            self._grow(max(highest + 1, min(2 * self._positions, self._limit)))
        return self._table[:, :, positions, None]

    def _grow(self, positions: int) -> None:
        where = torch.arange(positions)
        self._table = torch.stack([turns(rotation(where)) for rotation in self._rotations]).to(self._like)
        self._positions = positions

"""Lane: one sequence's rows in a GraphTarget's forward, the slots of their K/V and what they attend to.

A lane is tensors of fixed shapes. What one forward needs beyond their contents (slots and masks) is computed from them
on the device, so that a captured graph sees new contents when it is replayed. :class:`FixedLanes` are lanes of equal
shape, one for each sequence of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

NOT_SEEN = float("-inf")


@dataclass(slots=True)
class Contents:
    """What one forward puts into a lane: rows behind ``offset`` committed ones.

    ``positions`` of old and new rows, ``tokens`` of the new ones, ``seen`` (new, old + new). Where a lane has more rows
    than there are new ones, the others are padding and repeat the first row: so padding is as finite as that row is (a
    row that saw nothing would be NaN), and nothing sees its K/V, which lies behind that of the others.
    """

    offset: int
    positions: list[int]
    tokens: list[int]
    seen: Tensor

    def numbers(self, rows: int) -> list[int]:
        """Offset, positions and tokens for a lane of ``rows`` new rows."""
        pad = rows - len(self.tokens)
        return [self.offset, *self.positions, *self.positions[:1] * pad, *self.tokens, *self.tokens[:1] * pad]

    def padded_seen(self, rows: int) -> Tensor:
        """``seen`` for a lane of ``rows`` new rows."""
        pad = rows - len(self.tokens)
        return functional.pad(torch.cat([self.seen, self.seen[:1].expand(pad, -1)]), (0, pad))


@dataclass(slots=True)
class Lane:
    """Rows over ``cache``, (layers, 2, kv_heads, extent, head_size), read in place and written behind the offset.

    ``columns``: positions of what is committed, (extent,) or (layers, kv_heads, extent). ``numbers`` holds, in this
    order, the offset (how much of the cache is committed), the positions of old and new rows, and the tokens of the new
    ones. ``seen`` (new, old + new).
    """

    cache: Tensor
    columns: Tensor
    numbers: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, cache: Tensor, new: int, total: int) -> Lane:
        """For ``new`` rows of ``total``, the committed ones being those of a whole sequence."""
        device = cache.device
        return cls(
            cache,
            torch.arange(cache.shape[3], device=device),
            torch.zeros(1 + total + new, dtype=torch.long, device=device),
            torch.zeros(new, total, dtype=torch.bool, device=device),
        )

    def fill(self, contents: Contents) -> None:
        """Put in the contents."""
        self.numbers.copy_(torch.tensor(contents.numbers(len(self.seen))))
        self.seen.copy_(contents.padded_seen(len(self.seen)))

    @property
    def positions(self) -> Tensor:
        """Of the new rows."""
        return self._positions[-len(self.seen) :]

    @property
    def _positions(self) -> Tensor:
        return self.numbers[1 : 1 + self.seen.shape[1]]

    def slots(self) -> Tensor:
        """Where in the cache old and new rows lie."""
        return self.numbers[:1] + torch.arange(self.seen.shape[1], device=self.numbers.device)

    def masks(self, windows: list[int], groups: int, dtype: torch.dtype) -> list[Tensor]:
        """An additive mask for each window (0: none), (new * groups, extent): the query heads of a row in turn.

        (layers, kv_heads, new * groups, extent) for windows where every head reads other columns.
        """
        rows, extent = len(self.seen), self.columns.shape[-1]
        slots = self.slots()
        index = torch.arange(extent, device=self.columns.device)
        visible = (index < self.numbers[:1]).expand(rows, extent).clone().index_copy_(1, slots, self.seen)
        at = self.columns.clone()
        at.index_copy_(-1, slots, self._positions.expand(*at.shape[:-1], -1))
        reach = self.positions[:, None] - at[..., None, :]
        made = []
        for window in windows:
            shown = visible & (reach < window) if window else visible
            others = shown.shape[:-2]
            mask = torch.full((*others, rows, 1, extent), NOT_SEEN, dtype=dtype, device=shown.device)
            mask.masked_fill_(shown.unsqueeze(-2), 0.0)
            made.append(mask.expand(*others, rows, groups, extent).reshape(*others, rows * groups, extent))
        return made


class FixedLanes:
    """Lanes of ``rows`` rows each, over one cache each. Their contents lie side by side: two copies put in all."""

    def __init__(self, caches: Sequence[Tensor], rows: int) -> None:
        device, count = caches[0].device, len(caches)
        self.rows = rows
        self._numbers = torch.zeros(count, 1 + 2 * rows, dtype=torch.long, device=device)
        self._seen = torch.zeros(count, rows, rows, dtype=torch.bool, device=device)
        columns = {extent: torch.arange(extent, device=device) for extent in {cache.shape[3] for cache in caches}}
        self.lanes = [
            Lane(cache, columns[cache.shape[3]], numbers, seen)
            for cache, numbers, seen in zip(caches, self._numbers, self._seen, strict=True)
        ]

    def fill(self, contents: Sequence[Contents]) -> None:
        """Put in the contents of every lane."""
        self._numbers.copy_(torch.tensor([one.numbers(self.rows) for one in contents]))
        self._seen.copy_(torch.stack([one.padded_seen(self.rows) for one in contents]))

    @property
    def tokens(self) -> Tensor:
        """(lanes * rows,), end to end."""
        return self._numbers[:, -self.rows :].flatten()

    @property
    def positions(self) -> Tensor:
        """(lanes * rows,), end to end."""
        return self._numbers[:, 1 : 1 + self.rows].flatten()

    def tensors(self) -> list[Tensor]:
        """The memory that :meth:`fill` writes."""
        return [self._numbers, self._seen]

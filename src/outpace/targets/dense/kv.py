"""K/V of one sequence for the compiled kernels: one block of memory, keys transposed in blocks of sixteen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.targets.dense.binding import LANES, NativeModel, integers

_GRANULE = 256


class DenseKV:
    """Committed rows, (layers, 2, kv_heads, capacity * width).

    Keys and values of sixteen tokens take up the same span, so growing and forking copy a prefix of the last axis.
    """

    def __init__(self, model: NativeModel, shape: tuple[int, int, int], width: int, dtype: torch.dtype) -> None:
        self.model = model
        self.length = 0
        self.capacity = 0
        self.width = width
        self.data: Tensor = torch.empty(*shape, 0, dtype=dtype)

    def reserve(self, rows: int) -> None:
        """Room for ``rows`` more."""
        needed = self.length + rows
        if needed <= self.capacity:
            return
        capacity = _rounded(max(needed, 2 * self.capacity), _GRANULE)
        grown = torch.empty(*self.data.shape[:3], capacity * self.width, dtype=self.data.dtype)
        used = _rounded(self.length, LANES) * self.width
        grown[..., :used] = self.data[..., :used]
        self.data, self.capacity = grown, capacity

    def take(self, side: Tensor, rows: Sequence[int]) -> None:
        """Commit these rows of a forward's K/V, (layers, 2, kv_heads, n, width)."""
        self.reserve(len(rows))
        # A resumed pass may leave a part of an earlier one's, with gaps between its heads.
        side = side.contiguous()
        self.model.commit(self.data, self.capacity, self.length, side, integers(rows))
        self.length += len(rows)

    def advance(self, rows: int) -> None:
        """Commit the rows that a chunk of prefill has just laid behind the committed ones."""
        self.length += rows

    def fork(self, length: int | None = None) -> DenseKV:
        """An independent copy of the first ``length`` rows."""
        count = self.length if length is None else length
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot fork {count} of {self.length} committed tokens")
        layers, two, heads = self.data.shape[:3]
        twin = DenseKV(self.model, (layers, two, heads), self.width, self.data.dtype)
        twin.reserve(count)
        used = _rounded(count, LANES) * self.width
        twin.data[..., :used] = self.data[..., :used]
        twin.length = count
        return twin

    def clear(self) -> None:
        """Free the memory."""
        self.length = self.capacity = 0
        self.data = self.data.new_empty(*self.data.shape[:3], 0)


def _rounded(rows: int, to: int) -> int:
    return -(-rows // to) * to

"""DenseKV: a K/V store for the compiled kernels, one block of memory laid out as ``native/key_values.h`` says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from outpace.targets.dense.binding import LANES
from outpace.targets.dense.kv_memory import KVMemory
from outpace.targets.dense.native_model import Commitment, NativeModel
from outpace.targets.kv_store import ROWS_AT_ONCE, KVStore, check_block, rounded_up

_ANSWER = 64
"""Rows that there is room for behind those that it was made for."""


class DenseKV(KVStore):
    """Committed rows, (layers, 2, kv_heads, capacity * width); ``width``: elements of one head's key or value.

    Keys and values of sixteen tokens take up the same span, so growing and forking copy a prefix of the last axis.
    """

    def __init__(self, model: NativeModel, shape: tuple[int, int, int], dtype: torch.dtype, memory: KVMemory) -> None:
        """``shape``: (layers, 2, kv_heads)."""
        self.model, self.memory = model, memory
        self.capacity = 0
        self.width = model.kv_row_bytes // dtype.itemsize
        self.data: Tensor = torch.empty(*shape, 0, dtype=dtype, device="cpu")
        self.laid: Tensor | None = None
        """K/V of a forward whose first row lies behind the committed ones already; None: of none."""

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more."""
        capacity = self._capacity_with(rows)
        if capacity == self.capacity:
            return
        grown = self.memory.take((*self.data.shape[:3], capacity * self.width), self.data.dtype)
        used = rounded_up(self.length, LANES) * self.width
        grown[..., :used] = self.data[..., :used]
        self.memory.give(self.data)
        self.data, self.capacity, self.laid = grown, grown.shape[-1] // self.width, None

    def _capacity_with(self, rows: int) -> int:
        needed = self.length + rows
        if needed <= self.capacity:
            return self.capacity
        # A quarter more than there was: every row is moved a few times at most, and little memory lies idle. The first
        # room is for a prompt or a copy, which an answer follows.
        return rounded_up(max(needed + _ANSWER, self.capacity + self.capacity // 4), ROWS_AT_ONCE)

    def bytes_with(self, rows: int) -> int:
        layers, two, heads, _ = self.data.shape
        return layers * two * heads * self._capacity_with(rows) * self.width * self.data.itemsize

    def block(self, start: int, stop: int) -> Tensor:
        check_block(start, stop, self.length)
        return self.data[..., start * self.width : stop * self.width].clone()

    def append(self, block: Tensor, rows: int) -> None:
        check_block(self.length, self.length + rows, self.length + rows)
        self.reserve(rows)
        self.data[..., self.length * self.width : (self.length + rows) * self.width] = block
        self.advance(rows)

    def advance(self, rows: int) -> None:
        self.laid = None
        super().advance(rows)

    def truncate(self, length: int) -> None:
        self.laid = None
        super().truncate(length)

    def keys(self, start: int, stop: int) -> Tensor:
        layers, _, heads, _ = self.data.shape
        rows = torch.empty(layers, heads, stop - start, self.model.head_width, dtype=torch.float32, device="cpu")
        self.model.read_keys(self.data, self.capacity, start, stop, rows)
        return rows

    def take(self, side_kv: Tensor, rows: Sequence[int]) -> None:
        """Commit these rows of K/V: (layers, 2, kv_heads, n, width), or head size, in any floating point.

        Raises ValueError for K/V that was made elsewhere where the store keeps 8 bits, which only forwards make.
        """
        rows = self.take_laid(side_kv, rows)
        if rows:
            self.model.commit([self.taking(side_kv, rows)])

    def take_laid(self, side_kv: Tensor, rows: Sequence[int]) -> Sequence[int]:
        """Commit a first row that its forward has laid behind the committed ones; returns the other rows."""
        if self.laid is not side_kv or not rows or rows[0] != 0:
            return rows
        self.length, self.laid = self.length + 1, None
        return rows[1:]

    def taking(self, side_kv: Tensor, rows: Sequence[int]) -> Commitment:
        """What the kernels are to copy for :meth:`take`; from now on these rows count as committed."""
        self.laid = None
        if side_kv.dtype != self.data.dtype and not self.data.is_floating_point():
            raise ValueError("a store of K/V in 8 bits takes rows of its own target's forwards only")
        self.reserve(len(rows))
        if side_kv.shape[-1] < self.width:  # made elsewhere, by a head's own projections
            side_kv = pad(side_kv, (0, self.width - side_kv.shape[-1]))
        # A resumed pass may leave a part of an earlier one's, with gaps between its heads.
        side_kv = side_kv.to(self.data.dtype).contiguous()
        start, self.length = self.length, self.length + len(rows)
        return Commitment(self.data, self.capacity, start, side_kv, rows)

    def _copy(self, length: int) -> DenseKV:
        layers, two, heads = self.data.shape[:3]
        twin = DenseKV(self.model, (layers, two, heads), self.data.dtype, self.memory)
        twin.reserve(length)
        used = rounded_up(length, LANES) * self.width
        twin.data[..., :used] = self.data[..., :used]
        twin.length = length
        return twin

    def clear(self) -> None:
        self.length, self.capacity, self.laid = 0, 0, None
        self.memory.give(self.data)
        self.data = self.data.new_empty(*self.data.shape[:3], 0)

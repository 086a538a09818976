"""TorchKV: a K/V store at fixed addresses, in buffers of power-of-two capacity that a pool lends.

A captured graph reads and writes one buffer, wherever that is. So buffers are never resized; a sequence that outgrows
one moves to a larger one, and a buffer that is given back waits in the pool, its graphs with it, for the next sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.targets.kv_store import KVStore, check_block

SMALLEST = 256
KEPT = 8  # a sequence that grows leaves one of each size behind; together they are as large as the next


@dataclass(eq=False, slots=True)
class Buffer:
    """``data``: (layers, 2, kv_heads, capacity, head_size); keys are at 0 of the second axis, values at 1."""

    data: Tensor

    @property
    def capacity(self) -> int:
        return self.data.shape[3]


class Pool:
    """Lends buffers. Of those that came back ``keep`` are kept; ``dropped`` is called with each of the others.

    ``shape``: (layers, 2, kv_heads) of a buffer; ``like``: its precision and device.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        head_size: int,
        like: Tensor,
        dropped: Callable[[Buffer], None],
        keep: int = KEPT,
    ) -> None:
        self.free: list[Buffer] = []
        self._lent = 0
        self._most: int | None = None
        self._shape, self._head_size, self._like = shape, head_size, like
        self._dropped, self._keep = dropped, keep

    @torch.inference_mode()
    def take(self, rows: int) -> Buffer:
        """A buffer of zeros for at least ``rows`` rows.

        Zeros, not what the last sequence left: a masked column still enters 0 * value, and 0 * NaN is NaN.
        """
        capacity = self._capacity(rows)
        self._lent += self.bytes_of(rows)
        for buffer in reversed(self.free):  # the last one back has the most recently used graphs
            if buffer.capacity == capacity:
                self.free.remove(buffer)
                buffer.data.zero_()
                return buffer
        self._shrink()
        return Buffer(self._like.new_zeros(*self._shape, capacity, self._head_size))

    @staticmethod
    def _capacity(rows: int) -> int:
        return max(SMALLEST, 1 << (rows - 1).bit_length())

    def bytes_of(self, rows: int) -> int:
        """Bytes of the buffer that :meth:`take` lends for ``rows`` rows."""
        layers, two, heads = self._shape
        return layers * two * heads * self._capacity(rows) * self._head_size * self._like.itemsize

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        self._lent -= buffer.data.nbytes
        self.free.append(buffer)
        self._shrink()

    def limit(self, most: int | None) -> None:
        """From now on hold ``most`` bytes, lent or not (None: any number)."""
        self._most = most
        self._shrink()

    def _shrink(self) -> None:
        """Drop buffers that are not lent, those that came back first."""
        while len(self.free) > self._keep or (self.free and self._most is not None and self._bytes > self._most):
            self._dropped(self.free.pop(0))

    @property
    def _bytes(self) -> int:
        return self._lent + sum(one.data.nbytes for one in self.free)


class TorchKV(KVStore):
    """The first ``length`` rows of a buffer are committed; what lies behind them is scratch."""

    def __init__(self, pool: Pool) -> None:
        self.buffer: Buffer | None = None
        self._pool = pool

    @torch.inference_mode()
    def reserve(self, rows: int) -> Buffer:
        """The buffer, with room for ``rows`` behind the committed ones."""
        held = self.buffer
        if held is not None and held.capacity >= self.length + rows:
            return held
        larger = self._pool.take(self.length + rows)
        if held is not None:
            larger.data[..., : self.length, :] = held.data[..., : self.length, :]
            self._pool.give(held)
        self.buffer = larger
        return larger

    @torch.inference_mode()
    def keys(self, start: int, stop: int) -> Tensor:
        return self.reserve(0).data[:, 0, :, start:stop].float()

    @torch.inference_mode()
    def take(self, side_kv: Tensor, rows: Sequence[int]) -> None:
        """Commit these rows of K/V, (layers, 2, kv_heads, n, head_size) in any precision."""
        stop = self.length + len(rows)
        contiguous = list(rows) == list(range(len(rows)))
        chosen = side_kv[..., slice(len(rows)) if contiguous else torch.tensor(rows, device=side_kv.device), :]
        self.reserve(len(rows)).data[..., self.length : stop, :] = chosen
        self.length = stop

    @torch.inference_mode()
    def block(self, start: int, stop: int) -> Tensor:
        check_block(start, stop, self.length)
        return self.reserve(0).data[..., start:stop, :].clone()

    @torch.inference_mode()
    def append(self, block: Tensor, rows: int) -> None:
        check_block(self.length, self.length + rows, self.length + rows)
        self.take(block, range(rows))

    def bytes_with(self, rows: int) -> int:
        held, needed = self.buffer, self.length + rows
        if held is not None and held.capacity >= needed:
            return held.data.nbytes
        return self._pool.bytes_of(needed) if needed else 0

    @torch.inference_mode()
    def _copy(self, length: int) -> TorchKV:
        twin = TorchKV(self._pool)
        if self.buffer is not None and length:
            twin.reserve(length).data[..., :length, :] = self.buffer.data[..., :length, :]
            twin.length = length
        return twin

    def clear(self) -> None:
        if self.buffer is not None:
            self._pool.give(self.buffer)
        self.buffer, self.length = None, 0

"""KnownStates: hidden states of consecutive positions, in one block of memory that new ones are written behind."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 64
"""Room for so many at first."""


class KnownStates:
    """``len`` of them, each (width,), of the positions from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self.start = 0
        self._data = torch.empty(0, 0)
        self._first = self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def stop(self) -> int:
        """The first position that is not known."""
        return self.start + self._count

    @property
    def row_bytes(self) -> int:
        """Of one of them; 0 before the first is known."""
        return self._data.shape[1] * self._data.element_size()

    def add(self, count: int, width: int, like: Tensor) -> Tensor:
        """Memory for the next ``count`` of them, (count, width) of ``like``'s kind, for the caller to fill."""
        end = self._first + self._count
        if end + count > len(self._data):
            self._move(max(_LEAST, 2 * (self._count + count)), width, like)
            end = self._count
        self._count += count
        return self._data[end : end + count]

    def rows(self, start: int, stop: int) -> Tensor:
        """Those of the positions from ``start`` to ``stop``, (stop - start, width), in place."""
        first = self._first - self.start
        return self._data[first + start : first + stop]

    def cut(self, stop: int) -> None:
        """Forget those of positions from ``stop`` on."""
        self._count = max(0, min(self._count, stop - self.start))

    def forget(self, start: int) -> None:
        """Forget those of positions before ``start``."""
        gone = max(0, min(self._count, start - self.start))
        self.start += gone
        self._first += gone
        self._count -= gone
        if len(self._data) > max(2 * _LEAST, 4 * self._count):  # a long prompt's memory is given back
            self._move(max(_LEAST, 2 * self._count), self._data.shape[1], self._data)

    def clear(self, start: int = 0) -> None:
        """Forget all; the next one is of position ``start``."""
        self.start, self._first, self._count = start, 0, 0

    def _move(self, capacity: int, width: int, like: Tensor) -> None:
        larger = like.new_empty(capacity, width)
        if self._count:
            larger[: self._count] = self._data[self._first : self._first + self._count]
        self._data, self._first = larger, 0

"""KVStore: the K/V of one sequence's committed tokens, whatever layout a target keeps it in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor


def rows_to_keep(length: int | None, held: int) -> int:
    """``length`` of ``held`` committed tokens, all of them for None. Raises ValueError where there are fewer."""
    count = held if length is None else length
    if not 0 <= count <= held:
        raise ValueError(f"cannot keep {count} of {held} committed tokens")
    return count


ROWS_AT_ONCE = 256
"""Memory for committed rows grows by multiples of so many."""
BLOCK_ROWS = 16
"""Copied blocks begin and end at multiples of so many rows."""


def check_block(start: int, stop: int, length: int) -> None:
    """Raise ValueError for what is no block of a store that holds ``length`` rows."""
    if start % BLOCK_ROWS or stop % BLOCK_ROWS or not 0 <= start < stop <= length:
        raise ValueError(f"rows {start} to {stop} are no block of {length} committed rows: blocks are of {BLOCK_ROWS}")


def rounded_up(rows: int, to: int) -> int:
    """The smallest multiple of ``to`` that is at least ``rows``."""
    return -(-rows // to) * to


class KVStore(ABC):
    """Keys and values of the first ``length`` tokens of a sequence, and scratch rows behind them.

    A forward may lay its own rows behind the committed ones, so that attention reads one block. Scratch rows become
    committed by :meth:`take` or :meth:`advance` only; nothing reads them after the forward.
    """

    length: int = 0

    def reserve(self, rows: int) -> Any:  # noqa: B027 - some stores take memory with each row
        """Make room for ``rows`` more, so that none of them has to move what is committed."""

    @abstractmethod
    def keys(self, start: int, stop: int) -> Tensor:
        """Committed keys ``start`` to ``stop`` of every layer, copied: (layers, kv_heads, n, width) float32."""

    @abstractmethod
    def take(self, side_kv: Any, rows: Sequence[int]) -> None:
        """Commit these rows of a forward's K/V, which has the layout of the target that ran it."""

    @abstractmethod
    def block(self, start: int, stop: int) -> Any:
        """A copy of committed rows ``start`` to ``stop``, multiples of 16, in this store's own layout."""

    @abstractmethod
    def append(self, block: Any, rows: int) -> None:
        """Commit ``rows`` rows of :meth:`block`, copied. Raises ValueError where the committed rows are no multiple of
        16."""

    @abstractmethod
    def bytes_with(self, rows: int) -> int:
        """Bytes of memory with room for ``rows`` more."""

    def advance(self, rows: int) -> None:
        """Commit the first ``rows`` scratch rows, left by the prefill chunk that has just run."""
        self.length += rows

    def fork(self, length: int | None = None) -> Self:
        """An independent copy of the first ``length`` rows (None: all). Raises ValueError where there are fewer."""
        return self._copy(rows_to_keep(length, self.length))

    @abstractmethod
    def _copy(self, length: int) -> Self:
        """An independent copy of the first ``length`` rows, of which there are at least so many."""

    def truncate(self, length: int) -> None:
        """Give up all but the first ``length`` rows; the memory stays. Raises ValueError where there are fewer."""
        self.length = rows_to_keep(length, self.length)

    @abstractmethod
    def clear(self) -> None:
        """Give up all rows and free the memory."""

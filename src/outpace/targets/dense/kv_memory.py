"""KVMemory: the memory of sequences that have ended, for those that begin.

Memory that is new to a process costs a page fault for every page, which for the K/V of one request takes longer than a
round (LOG.md).
"""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_LARGE = 16 << 20
"""Bytes from which on memory is taken in large pages."""
_MOST = 512 << 20
"""Bytes that may lie idle."""


class KVMemory:
    """Blocks that were given back, by kind and size. With those in use they are never more bytes than the most that
    was in use at once."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, Tensor] = OrderedDict()
        """By number, the one that was given back first at the front."""
        self._sizes: dict[tuple[torch.dtype, int], list[int]] = {}
        """Numbers of the idle blocks by kind and elements."""
        self._number = 0
        self._in_use = self._most_in_use = self._idle_bytes = 0
        self._lock = Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the blocks that nobody uses."""
        return self._idle_bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor."""
        size = math.prod(shape)
        with self._lock:
            self._in_use += size * dtype.itemsize
            self._most_in_use = max(self._most_in_use, self._in_use)
            numbers = self._sizes.get((dtype, size))
            if numbers:
                block = self._idle.pop(numbers.pop())
                self._idle_bytes -= block.nbytes
                return block.view(shape)
            self._shrink()
        with torch.inference_mode(False):  # it may go to somebody who writes outside of that mode
            return _fresh(shape, dtype)

    def give(self, block: Tensor) -> None:
        """Give back what :meth:`take` gave. Nobody may read it afterwards."""
        if not block.nbytes:
            return
        with self._lock:
            self._in_use -= block.nbytes
            self._number += 1
            self._idle[self._number] = block.view(-1)
            self._sizes.setdefault((block.dtype, block.numel()), []).append(self._number)
            self._idle_bytes += block.nbytes
            self._shrink()

    def _shrink(self) -> None:
        """Let blocks go, those that have been idle longest first."""
        most = min(_MOST, self._most_in_use - self._in_use)
        while self._idle_bytes > most:
            number, block = self._idle.popitem(last=False)
            self._sizes[block.dtype, block.numel()].remove(number)
            self._idle_bytes -= block.nbytes


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A large tensor in large pages, where the system has them: a long prompt's K/V would be hundreds of thousands of
    small ones."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)

"""KVMemory: the memory of sequences that have ended, for those that begin.

Memory that is new to a process costs a page fault for every page, which for the K/V of one request takes longer than a
round (LOG.md).
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_LARGE = 16 << 20
"""Bytes from which on memory is taken in large pages."""
_MOST = 512 << 20
"""Bytes that may lie idle."""
_SPARE_SHARE = 4
"""Of the memory that nobody is going to need, a block that is longer than it has to be takes this part at most."""


class KVMemory:
    """Blocks that were given back, by kind and size. With those in use they are never more bytes than the most that
    was in use at once, nor than :meth:`limit` allows: idle blocks leave before blocks in use exceed that."""

    def __init__(self) -> None:
        self._idle: dict[int, Tensor] = {}
        """By number, in the order in which they were given back."""
        self._sizes: dict[tuple[torch.dtype, int], list[int]] = {}
        """Numbers of the idle blocks by kind and elements."""
        self._number = 0
        self._in_use = self._most_in_use = self._idle_bytes = 0
        self._bound: int | None = None
        """Bytes of all blocks, in use and idle; None: no bound."""
        self._spare = 0
        """Of the bound, the bytes that nobody is going to need."""
        self._lock = Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the blocks that nobody uses."""
        return self._idle_bytes

    def limit(self, most: int | None, planned: int = 0) -> None:
        """From now on hold ``most`` bytes, idle blocks included (None: any number). Blocks of the sizes that are asked
        for will be ``planned`` bytes of that; longer ones may take a part of the rest."""
        with self._lock:
            self._bound = most
            self._spare = 0 if most is None else max(0, most - planned)
            self._shrink()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor; its last axis may be up to twice as long as that of ``shape``."""
        size, unit = math.prod(shape), math.prod(shape[:-1])
        with self._lock:
            longest = size + self._surplus(size * dtype.itemsize) // dtype.itemsize
            found = [held for kind, held in self._sizes if kind == dtype and size <= held <= longest]
            fitting = min([held for held in found if held % unit == 0], default=0)
            self._in_use += (fitting or size) * dtype.itemsize
            self._most_in_use = max(self._most_in_use, self._in_use)
            if fitting:
                self._spare -= (fitting - size) * dtype.itemsize
                return self._remove(self._sizes[dtype, fitting][-1]).view(*shape[:-1], -1)
            self._shrink()
        with torch.inference_mode(False):  # it may go to somebody who writes outside of that mode
            return _fresh(shape, dtype)

    def _surplus(self, size: int) -> int:
        """Bytes by which a block may be larger than ``size``. Within a bound most of what is spare is left to requests
        that come: otherwise they would have to wait, and those that are under way be preempted."""
        return size if self._bound is None else min(size, max(0, self._spare) // _SPARE_SHARE)

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
        if self._bound is not None:
            most = min(most, self._bound - self._in_use)
        while self._idle and self._idle_bytes > most:
            self._remove(next(iter(self._idle)))

    def _remove(self, number: int) -> Tensor:
        block = self._idle.pop(number)
        numbers = self._sizes[block.dtype, block.numel()]
        numbers.remove(number)
        if not numbers:
            del self._sizes[block.dtype, block.numel()]
        self._idle_bytes -= block.nbytes
        return block


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A large tensor in large pages, where the system has them: a long prompt's K/V would be hundreds of thousands of
    small ones."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)

"""Python's numbers as the compiled kernels read them: by address, in memory that lives as long as the call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence as Seq
from typing import Any

from outpace.targets.dense.binding import PartRecord


class Integers:
    """int32 numbers of all parts of a forward, in one block of memory."""

    def __init__(self) -> None:
        self._numbers = array("i")
        self._places: list[tuple[PartRecord, str, int]] = []

    def add(self, record: PartRecord, field: str, numbers: Iterable[int]) -> None:
        """Let ``field`` of ``record`` be the address of these, once all were added."""
        self._places.append((record, field, len(self._numbers)))
        self._numbers.extend(numbers)

    def place(self) -> None:
        """Write the addresses. They hold as long as this object lives."""
        base = self._numbers.buffer_info()[0]
        for record, field, at in self._places:
            setattr(record, field, base + at * self._numbers.itemsize)


def flags_address(layers: frozenset[int], count: int, kept: list[Any]) -> int | None:
    """The address of a flag for each layer; None where none is set."""
    if not layers:
        return None
    flags = (ctypes.c_uint8 * count)(*(layer in layers for layer in range(count)))
    kept.append(flags)
    return ctypes.addressof(flags)


def integers_address(values: Seq[int], kept: list[Any]) -> int | None:
    """The address of int32 numbers, None for none."""
    if not values:
        return None
    array = (ctypes.c_int32 * len(values))(*values)
    kept.append(array)
    return ctypes.addressof(array)

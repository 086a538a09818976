"""What long runs do about memory."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # no glibc: its allocator has no such call, or no need of it
        return None


def give_back() -> None:
    """Return freed memory to the system, where the C library keeps it in pieces.

    Batches of many shapes leave holes of many sizes: a run on the CPU grew from 1 GB to 5 GB by them.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory is at its end, on whatever device."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "can't allocate memory" in said

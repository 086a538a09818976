"""Lru: a table with a bound; the least recently used entry leaves first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A table of at most ``bound`` entries; the least recently used leaves first. Reading an entry uses it."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.evicted = 0
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The entry, which becomes the most recently used, or None."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def recent(self) -> list[K]:
        """All keys, the most recently used first. Reading them uses none."""
        return list(reversed(self._entries))

    def put(self, key: K, value: V) -> None:
        """Enter or replace."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self.bound:
            self._entries.popitem(last=False)
            self.evicted += 1

"""Lru: a bounded table; the least recently used entry leaves first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A table of at most ``bound`` entries; the least recently used leaves first. Reading an entry uses it.

    ``evicted`` counts the entries that have left for others.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.evicted = 0
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The entry of a key, which becomes the most recently used; None where there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def recent(self) -> list[K]:
        """All keys, the most recently used first; using none."""
        return list(reversed(self._entries))

    def items(self) -> list[tuple[K, V]]:
        """All entries, the least recently used first; using none."""
        return list(self._entries.items())

    def put(self, key: K, value: V) -> V | None:
        """Enter or replace an entry, as the most recently used. Returns the value that had to leave for it."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) <= self.bound:
            return None
        self.evicted += 1
        return self._entries.popitem(last=False)[1]

    def drop(self, key: K) -> None:
        """Remove an entry, if it is there; it does not count as evicted."""
        self._entries.pop(key, None)

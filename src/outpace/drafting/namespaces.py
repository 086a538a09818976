"""What outlives a request, and whose it is.

What a drafter learns belongs to the namespace that the request names. A request that names none has a memory of its
own, gone when it ends. Nothing learned in one namespace is drafted in another: text can leak through what is drafted,
and through how fast it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from outpace.core.lru import Lru
from outpace.targets.base import Sequence

T = TypeVar("T")


class Namespaces(Generic[T]):
    """One memory per namespace, made by ``make``; of at most ``most`` the least recently opened leaves first.

    A running request keeps the memory that it opened. Greedy and sampled requests of a name have memories of their
    own: what a greedy request drafts depends on measured times, and a sampled answer must not.
    """

    def __init__(self, make: Callable[[], T], most: int = 64) -> None:
        self._make = make
        self._named: Lru[tuple[str, bool], T] = Lru(most)

    def __len__(self) -> int:
        return len(self._named)

    def open(self, sequence: Sequence) -> T:
        """The memory for a request that joins: its namespace's, or its own."""
        if not sequence.namespace:
            return self._make()
        name = sequence.namespace, sequence.params.greedy
        memory = self._named.get(name)
        if memory is None:
            memory = self._make()
            self._named.put(name, memory)
        return memory

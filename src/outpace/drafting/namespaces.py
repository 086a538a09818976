"""What outlives a request, and whose it is.

What a drafter learns belongs to the namespace that the request names. A request that names none has a memory of its
own, gone when it ends. Nothing learned in one namespace is drafted in another: text can leak through what is drafted,
and through how fast it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from outpace.core.lru import Lru
from outpace.core.sampling import SamplingParams
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


class EarlierRequests:
    """Counts the requests of every namespace by seed, for their random numbers (:mod:`outpace.core.chance`).

    At most ``most`` pairs are kept. One that left goes on from the largest count that any had when it left, as does
    every new one after that: so no pair is given a number twice, whatever drafters still know of it.
    """

    def __init__(self, most: int = 16_384) -> None:
        self._counts: Lru[tuple[str, int], int] = Lru(most)
        self._least = 0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, namespace: str, params: SamplingParams) -> int:
        """Count a request. Returns the number of earlier ones of its namespace and seed; 0 without a namespace.

        Greedy requests are not counted: they are a function of the prompt, and sampled ones learn nothing of them.
        """
        if not namespace or params.greedy:
            return 0
        pair = namespace, params.fixed_seed
        known = self._counts.get(pair)
        count = self._least if known is None else known
        left = self._counts.put(pair, count + 1)
        if left is not None:
            self._least = max(self._least, left)
        return count

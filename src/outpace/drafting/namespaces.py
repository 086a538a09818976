"""What outlives a request, and whose it is.

State that a drafter learns belongs to the namespace that the request names. A request that names none has a state of
its own, gone when it ends. Nothing learned in one namespace is drafted in another: text can leak through what is
drafted, and through how fast it is accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from outpace.targets.base import Sequence

T = TypeVar("T")


class Namespaces(Generic[T]):
    """One state a namespace, made by ``make``; at most ``most`` are kept, the least recently used leaves first.

    Those of running requests stay, so there may be more for a while. Greedy and sampled requests of a name have states
    of their own: what a greedy request drafts, and so what is learned from it, goes by the clock, and a sampled answer
    must not.
    """

    def __init__(self, make: Callable[[], T], most: int = 64) -> None:
        self._make = make
        self._most = most
        self._named: OrderedDict[tuple[str, bool], T] = OrderedDict()
        self._open: dict[Sequence, T] = {}

    def __len__(self) -> int:
        return len(self._named)

    def open(self, sequence: Sequence) -> T:
        """The state for a request that joins: its namespace's, or its own."""
        name = sequence.namespace, sequence.params.greedy
        if not sequence.namespace:
            state = self._make()
        else:
            state = self._named[name] if name in self._named else self._make()
            self._named[name] = state
            self._named.move_to_end(name)
        self._open[sequence] = state
        self._shrink()
        return state

    def __getitem__(self, sequence: Sequence) -> T:
        """The state of a running request."""
        return self._open[sequence]

    def close(self, sequence: Sequence) -> None:
        """The request left."""
        self._open.pop(sequence, None)
        self._shrink()

    def _shrink(self) -> None:
        spare = len(self._named) - self._most
        if spare > 0:
            running = {(one.namespace, one.params.greedy) for one in self._open}
            for name in [name for name in self._named if name not in running][:spare]:
                del self._named[name]

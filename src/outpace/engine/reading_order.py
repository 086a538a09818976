"""ReadingOrder: whose prompts a step reads first, for the decoder and for its simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class _HasPriority(Protocol):
    @property
    def priority(self) -> int: ...


class Reads(Protocol):
    """A request with a priority."""

    @property
    def request(self) -> _HasPriority: ...


R = TypeVar("R", bound=Reads)


class ReadingOrder:
    """By priority, then by turns the shortest and the oldest first. A short prompt does not wait until a long one has
    been read, which gets half of the rows."""

    def __init__(self) -> None:
        self._shortest_first = False
        """Whether the step under way reads the prompts first of which the least is left."""

    def next(self, reading: Iterable[R], unread: Callable[[R], int]) -> list[R]:
        """The next step's order of ``reading``, which stand in the order of their arrival. ``unread``: tokens of one's
        prompt that are left."""
        self._shortest_first = not self._shortest_first
        left = unread if self._shortest_first else lambda _: 0
        return sorted(reading, key=lambda one: (-one.request.priority, left(one)))

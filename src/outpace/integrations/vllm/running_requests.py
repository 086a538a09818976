"""The requests of an engine's batch, from call to call: by their ids, or, where these are not shown, by their tokens.

Rows move when requests finish, leave when they are preempted, and come back later. An id tells a request surely. Where
there is none, a row continues the request whose tokens it begins with.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.core.tree import TokenTree
from outpace.targets.base import Sequence

Tokens = npt.NDArray[np.int32]
_LONGEST_GAP = 256
"""Tokens that a row may have gained since it was seen: vLLM does not ask near the end of the context."""
_UNSEEN = 512
"""Calls after which a request that was not seen has ended, where ids are not shown."""


@dataclass(slots=True)
class Running:
    """A request under way. ``state``: its drafter's; ``drafted``: the tree of the last call, which the tokens since
    then are the answer to."""

    sequence: Sequence
    state: Any
    known: Tokens
    """Its tokens, to be compared with rows; ``length`` of them."""
    length: int
    row: int
    drafted: TokenTree = field(default_factory=TokenTree)
    answered: bool = True
    seen: int = 0

    def take(self, row: Tokens, count: int) -> list[int]:
        """The tokens that ``row``, of ``count`` tokens, has gained."""
        fresh: list[int] = row[self.length : count].tolist()
        if count > len(self.known):
            self.known = np.resize(self.known, max(count, 2 * len(self.known)))
        self.known[self.length : count] = row[self.length : count]
        self.length = count
        return fresh

    def begins(self, row: Tokens, count: int) -> bool:
        """Whether a row of ``count`` tokens goes on from this request's."""
        if (
            not self.length <= count <= self.length + _LONGEST_GAP
            or row[self.length - 1] != self.known[self.length - 1]
        ):
            return False
        return row[: self.length].tobytes() == self.known[: self.length].tobytes()


class RunningRequests:
    """All requests that are known. ``most``: of requests without ids, the one that was not seen for longest leaves."""

    def __init__(self, most: int) -> None:
        self._by_id: dict[str, Running] = {}
        self._unnamed: list[Running] = []
        self._most = most
        self._calls = 0

    def __len__(self) -> int:
        return len(self._by_id) + len(self._unnamed)

    def began_call(self) -> None:
        """A call of the engine begins: each request may be found once in it."""
        self._calls += 1

    def find(self, name: str | None, index: int, row: Tokens, count: int) -> Running | None:
        """The request that row ``index``, of ``count`` tokens, belongs to; None for a new one."""
        if name is not None:
            one = self._by_id.get(name)
            # Its tokens are replaced where an engine begins it again; then it is a new one.
            if one is not None and not one.begins(row, count):
                del self._by_id[name]
                one = None
        else:
            fitting = [one for one in self._unnamed if one.seen != self._calls and one.begins(row, count)]
            # The longest beginning; of equals the one that was in this row.
            one = max(fitting, key=lambda known: (known.length, known.row == index), default=None)
        if one is not None:
            one.row, one.seen = index, self._calls
        return one

    def add(self, name: str | None, one: Running) -> None:
        one.seen = self._calls
        if name is None:
            self._unnamed.append(one)
        else:
            self._by_id[name] = one

    def gone(self, names: Iterable[str] | None, known: Container[str] = ()) -> list[Running]:
        """Requests that have ended, which are forgotten now. ``names``: of all in the batch; ``known``: of all that the
        engine knows, with those that it has preempted."""
        if names is not None:
            return [self._by_id.pop(name) for name in self._by_id.keys() - set(names) if name not in known]
        left: list[Running] = []
        if self._unnamed and (len(self._unnamed) > self._most or self._calls % 64 == 0):
            self._unnamed.sort(key=lambda one: -one.seen)
            kept = [one for one in self._unnamed[: self._most] if self._calls - one.seen < _UNSEEN]
            left = self._unnamed[len(kept) :]
            self._unnamed = kept
        return left


def known_tokens(row: Tokens, count: int) -> Tokens:
    """A copy of a row's tokens, of the row's type, with room to grow."""
    found = np.zeros(max(64, count + count // 2 + 64), row.dtype)
    found[:count] = row[:count]
    return found

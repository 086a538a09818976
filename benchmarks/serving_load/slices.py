"""Servers in slices of time: one goes on while the others are stopped, and each has a clock of its own.

A machine that other programs slow down for some seconds slows all servers down then, not the one whose turn it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence as Seq
from time import perf_counter
from types import TracebackType
from typing import Protocol, Self

SLICE = 0.2
"""Seconds."""


class Pausable(Protocol):
    """A server's process."""

    def pause(self, *, paused: bool) -> None: ...


class Slices:
    """Servers that take turns until each of them has :meth:`ended`. As a context manager; all go on afterwards."""

    def __init__(self, servers: Seq[Pausable], seconds: float | None = None) -> None:
        """``seconds``: of a slice; None: :data:`SLICE`."""
        self._left, self._seconds = list(servers), SLICE if seconds is None else seconds
        self._all = list(servers)
        self._ran = dict.fromkeys(map(id, servers), 0.0)
        self._now: Pausable | None = None
        self._since = 0.0
        self._changed = threading.Condition()
        self._turns = threading.Thread(target=self._take_turns, daemon=True)

    def __enter__(self) -> Self:
        for one in self._all:
            one.pause(paused=True)
        self._turns.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._changed:
            self._left.clear()
            self._changed.notify()
        self._turns.join()
        for one in self._all:
            one.pause(paused=False)

    def clock(self, server: Pausable) -> Callable[[], float]:
        """Seconds for which it has run in its slices."""

        def read() -> float:
            with self._changed:
                running = perf_counter() - self._since if self._now is server else 0.0
                return self._ran[id(server)] + running

        return read

    def ended(self, server: Pausable) -> None:
        """It has nothing left to answer, and gets no more turns."""
        with self._changed:
            if server in self._left:
                self._left.remove(server)
            self._changed.notify()

    def _take_turns(self) -> None:
        with self._changed:
            while self._left:
                one = self._left.pop(0)
                self._left.append(one)
                if one is not self._now:
                    self._stop()
                    one.pause(paused=False)
                    self._now, self._since = one, perf_counter()
                self._changed.wait_for(lambda one=one: one not in self._left, self._seconds)  # type: ignore[misc]
            self._stop()

    def _stop(self) -> None:
        if self._now is not None:
            self._now.pause(paused=True)
            self._ran[id(self._now)] += perf_counter() - self._since
            self._now = None

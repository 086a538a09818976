"""Turns: a lock that threads get in the order in which they asked, for work that must not run side by side.

Drafters, targets and the compiled kernels keep state between calls that belongs to the whole process, so one thread at
a time builds methods and runs rounds (:data:`ROUNDS`). Decoders of several threads alternate, round by round: a plain
lock would go back to the thread that has just released it, and the others would wait for its last round.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A re-entrant lock; those that wait get it in their order."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nobody holds it, nobody waits: what is true in a forked process, whose other threads are gone."""
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    @property
    def held(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()  # released by whoever had the turn before
        except BaseException:  # Ctrl-C while it waited
            with self._mutex:
                if self._owner == me:
                    self._hand_over()
                else:
                    self._waiting.remove((me, turn))
            raise

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                self._hand_over()

    def _hand_over(self) -> None:
        if self._waiting:
            self._owner, turn = self._waiting.popleft()
            self._depth = 1
            turn.release()
        else:
            self._owner, self._depth = None, 0


ROUNDS = Turns()
"""Held while a method is built, a request is opened or closed, and a round runs."""

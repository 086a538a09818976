"""Ctrl-C while an answer, or a step of training, is under way; SIGTERM where results so far are worth keeping."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outpace.engine.request import Generation

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, and the line that is printed about it after "interrupted: "; the exit code is 130."""

    @classmethod
    def partial(cls, done: int, total: int, by: str = "", *, shown: bool = False) -> Interrupted:
        """Of a measurement: what was finished is reported. ``by``: what ended it, where that was not Ctrl-C.

        ``shown``: some results are reported although no prompt was done by all that are compared.
        """
        begin = f"by {by}; " if by else ""
        if done:
            return cls(f"{begin}{done} of {total} prompts done; the results cover these")
        return cls(f"{begin}no prompt was finished" + (" by every row" if shown else ", nothing is reported"))

    @classmethod
    def kept(cls, done: str, place: object) -> Interrupted:
        """Of work that --resume continues. ``done``: how much of it, as "12 of 40 sets"."""
        return cls(f"{done} done, kept in {place}; continue with --resume")

    @classmethod
    def nothing(cls, done: str = "") -> Interrupted:
        """Of work of which nothing remains."""
        return cls(f"{done} done, nothing was kept" if done else "nothing was kept")


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends what runs inside as Ctrl-C does, with its name as what the KeyboardInterrupt says."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def deferred(
    stop: Callable[[], object] = lambda: None,
    ready: Callable[[], bool] = lambda: True,
    signals: Sequence[signal.Signals] = (signal.SIGINT,),
) -> Iterator[Interrupt]:
    """Ctrl-C calls ``stop`` and lets what is under way end. Pressed again, or while it is not ``ready``, it raises.

    ``signals``: those that count as Ctrl-C.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def press(*_: object) -> None:
        if interrupt.pressed or not ready():
            raise KeyboardInterrupt
        interrupt.pressed = True
        stop()

    before = {one: signal.signal(one, press) for one in signals}
    try:
        yield interrupt
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def interruptible(generation: Generation) -> AbstractContextManager[Interrupt]:
    """Ctrl-C lets the round under way end and keeps the answer so far; before the first token, or twice, it raises."""
    return deferred(generation.cancel, lambda: bool(generation.tokens))

"""Ctrl-C while an answer is under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outpace.decoding import Generation


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@contextmanager
def interruptible(generation: Generation) -> Iterator[Interrupt]:
    """Ctrl-C lets the round under way end and keeps the answer so far; before the first token, or twice, it raises.

    An exception in the middle of a round would leave the K/V and the tokens out of step.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def press(*_: object) -> None:
        if interrupt.pressed or not generation.tokens:
            raise KeyboardInterrupt
        interrupt.pressed = True
        generation.cancel()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)

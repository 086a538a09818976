"""What ends a comparison early: Ctrl-C, a signal, the time limit. What was measured until then is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter


class Stopped(KeyboardInterrupt):
    """Ends a run as Ctrl-C does. ``str()`` says by what."""


@dataclass(slots=True)
class TimeLimit:
    """``minutes`` from now on; None is no limit. ``clock``: seconds."""

    minutes: float | None = None
    clock: Callable[[], float] = perf_counter
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float:
        """Seconds until the end; 0 when it is reached."""
        if self.minutes is None:
            return math.inf
        return max(0.0, self.began + 60 * self.minutes - self.clock())

    def check(self) -> None:
        """Raise Stopped when the end is reached."""
        if not self.left:
            raise Stopped(f"--max-minutes {self.minutes:g}")

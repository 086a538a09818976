"""How much CPU time other programs took while a comparison ran.

Libraries whose threads spin while they wait lose most where another program needs a core: a comparison on a busy
machine ranks waiting strategies, not speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import psutil  # type: ignore[import-untyped, unused-ignore]

from outpace.core.metrics import ratio

NOTED = 0.05
"""Share of the CPUs' time from which on the report has a note about it."""


class CpuContention:
    """Adds up, round by round, the CPU time that was not that of this process and its workers."""

    def __init__(self) -> None:
        self._spent = self._seconds = 0.0
        self._began = 0.0
        self._busy = 0.0
        self._own: dict[int, float] = {}

    def begin(self, workers: Iterable[int]) -> None:
        """A round begins; ``workers`` are process ids."""
        self._own = _own(workers)
        self._busy, self._began = _busy(), perf_counter()

    def end(self) -> None:
        """The round ended. It is left out if a worker ended during it, whose CPU time is then no longer known."""
        now, busy, own = perf_counter(), _busy(), _own([pid for pid in self._own if pid != psutil.Process().pid])
        if own.keys() == self._own.keys():
            self._spent += max(0.0, busy - self._busy - (sum(own.values()) - sum(self._own.values())))
            self._seconds += now - self._began

    @property
    def share(self) -> float | None:
        """What others took, as a share of the time of all CPUs; None before the first round."""
        return ratio(self._spent, self._seconds * (psutil.cpu_count() or 1))


def _busy() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own(workers: Iterable[int]) -> dict[int, float]:
    """Seconds by process; what a worker started is its own."""
    found = {}
    for pid in (psutil.Process().pid, *workers):
        try:
            one = psutil.Process(pid)
            started = one.children(recursive=True) if pid != psutil.Process().pid else []
            found[pid] = sum(sum(each.cpu_times()[:2]) for each in (one, *started))
        except psutil.Error:
            continue
    return found

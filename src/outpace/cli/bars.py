"""Progress bars on standard error; where it is no terminal, a line a minute."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from outpace.cli.output import err

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from outpace.bench.settings import Progress as BenchProgress

_SAY = 60.0  # seconds between two lines where nobody watches a bar


class Bar:
    """A bar on a terminal; elsewhere a line a minute, for whoever reads the log of a long run."""

    def __init__(self, what: str, progress: Progress, task: TaskID, *, watched: bool) -> None:
        self._what, self._progress, self._task, self._watched = what, progress, task, watched
        self._said = time.monotonic()

    def move(self, done: int, total: int, doing: str) -> None:
        """Show that ``done`` of ``total`` is done, and what is being done."""
        if self._watched:
            self._progress.update(self._task, completed=done, total=total, description=f"{self._what}: {doing}")
        elif time.monotonic() - self._said >= _SAY:
            self._said = time.monotonic()
            print(f"{self._what}: {100 * done / max(1, total):.0f}%, {doing}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def bar(what: str) -> Iterator[Bar]:
    """A bar for ``what`` while the context lasts; gone afterwards."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = err()
    columns = (BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("[dim]{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(what, progress, progress.add_task(what, total=None), watched=console.is_terminal)


@contextlib.contextmanager
def advancing() -> Iterator[Callable[[BenchProgress], None]]:
    """A bar while a bench runs, and what moves it."""
    with bar("bench") as shown:
        yield lambda now: shown.move(now.done, now.total, f"{now.method} {now.category}")

"""Bars of commands that run for hours."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outpace.cli.output import err

_SAY = 60.0  # seconds between two lines where nobody watches a bar


class Bar:
    """A bar on a terminal; elsewhere a line a minute, for whoever reads the log of a long run."""

    def __init__(self, what: str, progress: Progress, task: TaskID, *, watched: bool) -> None:
        self._what, self._progress, self._task, self._watched = what, progress, task, watched
        self._said = time.monotonic()

    def move(self, done: int, total: int, doing: str) -> None:
        """What is done by now, of what."""
        if self._watched:
            self._progress.update(self._task, completed=done, total=total, description=f"{self._what}: {doing}")
        elif time.monotonic() - self._said >= _SAY:
            self._said = time.monotonic()
            print(f"{self._what}: {100 * done / max(1, total):.0f}%, {doing}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def bar(what: str) -> Iterator[Bar]:
    """A bar for ``what`` while the context lasts."""
    console = err()
    columns = (BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("[dim]{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(what, progress, progress.add_task(what, total=None), watched=console.is_terminal)

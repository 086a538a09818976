"""A bar on standard error while a batch is decoded."""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

from outpace.core.errors import BadInput, shown

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE = 1.0  # seconds; what is done sooner shows no bar


class BatchProgress:
    """Counts the answers of a batch. ``wanted``: None shows the bar at a terminal, if it takes longer than a second."""

    def __init__(self, total: int, wanted: bool | None) -> None:
        if wanted not in (None, True, False):
            raise BadInput(f"progress must be True, False or None, not {shown(wanted)}")
        self._total = total
        self._shown = total > 1 and sys.stderr.isatty() if wanted is None else wanted
        self._patience = _PATIENCE if wanted is None else 0.0
        self._began = perf_counter()
        self._done = 0
        self._bar: Progress | None = None

    def __enter__(self) -> BatchProgress:
        return self

    def advance(self) -> None:
        """One more answer has ended."""
        self._done += 1
        if not self._shown or perf_counter() - self._began < self._patience:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

            columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("generating", total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self._done)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

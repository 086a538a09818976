"""Progress on standard error: a bar for each stage on a terminal, lines at growing intervals elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column

from outpace.cli import output
from outpace.core.progress import Stage, reporting, stage

if TYPE_CHECKING:
    from outpace.bench.settings import Progress as BenchProgress

_INTERVALS = (10.0, 60.0, 60.0, 120.0, 300.0)
"""Seconds before the next line of a log; the last one is repeated."""
_SETTLING = 2.0  # seconds before a rate is shown


@dataclass(slots=True)
class Shown:
    """A stage as it is shown. ``began``, ``counted_from``: when it began, and when and where counting began.

    ``lines``: how many lines a log has of it, and ``said``: when it got the last one.
    """

    began: float
    counted_from: tuple[float, float] | None = None
    lines: int = 0
    said: float = 0.0
    task: TaskID | None = None


class Bars:
    """Shows stages (:class:`outpace.core.progress.Reporter`). ``clock``: seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._shown: dict[Stage, Shown] = {}
        self._live: Progress | None = None
        self.unfinished = "nothing was kept"
        """What to say after Ctrl-C of work that keeps nothing: how far its last counted stage came."""

    def began(self, one: Stage) -> None:
        now = self._clock()
        shown = self._shown[one] = Shown(now, said=now)
        if self._console.is_terminal:
            if self._live is None:
                self._live = _display(self._console)
                self._live.start()
                output.share(self._console)
            shown.task = self._live.add_task(one.name, total=one.total, words="")
        elif not one.brief:
            self._say(f"{one.name} ...")

    def moved(self, one: Stage) -> None:
        shown = self._shown.get(one)
        if shown is None:
            return
        now = self._clock()
        if shown.counted_from is None:  # what an earlier run had done does not count towards the rate
            shown.counted_from = now, one.done
        if self._live is not None and shown.task is not None:
            words = ", ".join(filter(None, (figures(one, shown, now), one.detail)))
            self._live.update(shown.task, completed=one.done, total=one.total, words=words)
        elif now - shown.said >= _INTERVALS[min(shown.lines, len(_INTERVALS) - 1)]:
            shown.said, shown.lines = now, shown.lines + 1
            self._say(f"{one.name}: {line(one, shown, now)}")

    def ended(self, one: Stage) -> None:
        shown = self._shown.pop(one, None)
        if shown is None:
            return
        if one.unit and one.unit != "B" and one.done:
            self.unfinished = f"{counted(one.done, one.total, one.unit)} done, nothing was kept"
        if self._live is not None and shown.task is not None:
            self._live.remove_task(shown.task)
            if not self._shown:
                self._live.stop()
                self._live = None
                output.share(None)
        elif shown.lines:
            done = counted(one.done, None, one.unit) if one.unit else ""
            self._say(
                f"{one.name}: ended after {duration(self._clock() - shown.began)}" + (f", {done}" if done else "")
            )

    def close(self) -> None:
        """Take all bars away, also those of threads that have not ended."""
        for one in list(self._shown):
            self.ended(one)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def figures(one: Stage, shown: Shown, now: float) -> str:
    """12 of 40 prompts, 6.2 prompts/min, 1:56 elapsed, about 4:31 left."""
    parts = [counted(one.done, one.total, one.unit)] if one.unit else []
    began, from_where = shown.counted_from or (now, one.done)
    elapsed, done = now - began, one.done - from_where
    if one.unit and done > 0 and elapsed >= _SETTLING:
        parts.append(rate(done / elapsed, one.unit))
    parts.append(f"{duration(now - shown.began)} elapsed")
    if one.total and done > 0 and one.done < one.total and elapsed >= _SETTLING:
        parts.append(f"about {duration((one.total - one.done) * elapsed / done)} left")
    return ", ".join(parts)


def line(one: Stage, shown: Shown, now: float) -> str:
    """The same, with the share that is done and what is being done, for a log."""
    share = f"{100 * min(1.0, one.done / one.total):.0f}%, " if one.total else ""
    return share + figures(one, shown, now) + (f"; {one.detail}" if one.detail else "")


def counted(done: float, total: float | None, unit: str) -> str:
    """12 of 40 prompts; 12.5 of 270.0 MB."""
    if unit == "B":
        return f"{done / 1e6:,.1f}" + ("" if total is None else f" of {total / 1e6:,.1f}") + " MB"
    return f"{done:,.0f}" + ("" if total is None else f" of {total:,.0f}") + f" {unit}"


def rate(per_second: float, unit: str) -> str:
    """A rate in the largest of the units of time that it needs: 12.0 tokens/s, 6.2 prompts/min, 3.1 prompts/h."""
    if unit == "B":
        return f"{per_second / 1e6:,.1f} MB/s"
    for factor, name in ((1, "s"), (60, "min")):
        if per_second * factor >= 1:
            return f"{per_second * factor:,.{1 if per_second * factor < 100 else 0}f} {unit}/{name}"
    return f"{per_second * 3600:,.1f} {unit}/h"


def duration(seconds: float) -> str:
    """0:05, 12:34, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Bar(BarColumn):
    """A bar where the end is known; a spinner stands for it otherwise."""

    def render(self, task: Task):  # type: ignore[no-untyped-def]
        return super().render(task) if task.total else ""


def _display(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        _Bar(16),
        TextColumn("[dim]{task.fields[words]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        console=console,
        transient=True,
        expand=True,
    )


@contextlib.contextmanager
def showing() -> Iterator[Bars]:
    """Show the stages of everything that runs inside."""
    bars = Bars(output.err())
    with reporting(bars):
        try:
            yield bars
        finally:
            bars.close()


@contextlib.contextmanager
def advancing(what: str = "benchmark") -> Iterator[Callable[[BenchProgress], None]]:
    """A stage while a bench runs, and what moves it."""
    with stage(what, unit="answers") as at:
        yield lambda now: at.move(now.done, now.total, f"{now.method} {now.category}".strip())

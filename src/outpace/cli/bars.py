"""Progress on standard error: a bar for each stage on a terminal, lines at growing intervals elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from outpace.cli import output
from outpace.core.progress import Stage, reporting, stage

if TYPE_CHECKING:
    from outpace.bench.settings import Progress as BenchProgress

_INTERVALS = (10.0, 60.0, 60.0, 120.0, 300.0)
"""Seconds before the next line of a log; the last one is repeated."""
_SETTLING = 2.0  # seconds before a rate is shown


@dataclass(slots=True)
class Shown:
    """A stage as it is shown. ``began``, ``counted_from``: when it began, and when and where its count began to grow.

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
        if one.inner and not self._shown:
            return
        now = self._clock()
        shown = self._shown[one] = Shown(now, said=now)
        if self._console.is_terminal:
            if self._live is None:
                self._live = _display(self._console, self._clock)
                self._live.start()
                output.share(self._console)
            shown.task = self._live.add_task(one.name, total=one.total, stage=one, shown=shown)
        elif not one.brief:
            self._say(f"{one.name} ...")

    def moved(self, one: Stage) -> None:
        shown = self._shown.get(one)
        if shown is None:
            return
        now = self._clock()
        # What an earlier run had done does not count towards the rate, nor does loading before the first count.
        if shown.counted_from is None or one.done == shown.counted_from[1]:
            shown.counted_from = now, one.done
        if self._live is not None and shown.task is not None:
            self._live.update(shown.task, completed=one.done, total=one.total)
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


def figures(one: Stage, shown: Shown, now: float, *, short: bool = False) -> list[str]:
    """["12 of 40 prompts", "6.2 prompts/min", "1:56 elapsed", "about 4:31 left"], as far as they are known.

    ``short``: as there is room for in a line with a bar, ["12/40 prompts", "6.2/min", "1:56 elapsed", "4:31 left"].
    """
    parts = [counted(one.done, one.total, one.unit, "/" if short else " of ")] if one.unit else []
    began, from_where = shown.counted_from or (now, one.done)
    elapsed, done = now - began, one.done - from_where
    known = done > 0 and elapsed >= _SETTLING
    if one.unit and known:
        parts.append(rate(done / elapsed, one.unit, short=short))
    parts.append(f"{duration(now - shown.began)} elapsed")
    if one.total and one.done < one.total and known:
        left = duration((one.total - one.done) * elapsed / done)
        parts.append(f"{left} left" if short else f"about {left} left")
    return parts


def line(one: Stage, shown: Shown, now: float) -> str:
    """The same with the share that is done and what is being done, for a log."""
    share = [f"{100 * min(1.0, one.done / one.total):.0f}%"] if one.total else []
    return ", ".join([*share, *figures(one, shown, now)]) + (f"; {one.detail}" if one.detail else "")


def counted(done: float, total: float | None, unit: str, of: str = " of ") -> str:
    """12 of 40 prompts; 12.5 of 270.0 MB."""
    scale, digits, name = (1e6, 1, "MB") if unit == "B" else (1, 0, unit)
    shown = [f"{value / scale:,.{digits}f}" for value in (done, total) if value is not None]
    return f"{of.join(shown)} {name}"


def rate(per_second: float, unit: str, *, short: bool = False) -> str:
    """A rate by the second, the minute or the hour: 12.0 tokens/s, 6.2 prompts/min. ``short``: without the unit."""
    if unit == "B":
        return f"{per_second / 1e6:,.1f} MB/s"
    name = "" if short else f" {unit}"
    for factor, time_unit in ((1, "s"), (60, "min")):
        if per_second * factor >= 1:
            return f"{per_second * factor:,.{1 if per_second * factor < 100 else 0}f}{name}/{time_unit}"
    return f"{per_second * 3600:,.1f}{name}/h"


def duration(seconds: float) -> str:
    """0:05, 12:34, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Bar(BarColumn):
    """A bar where the end is known."""

    def render(self, task: Task) -> Any:
        return super().render(task) if task.total else ""


class _Words(ProgressColumn):
    """The figures as they are now: time goes on between two moves."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        self._clock = clock

    def render(self, task: Task) -> Text:
        one, shown = task.fields["stage"], task.fields["shown"]
        return Text(" ".join([*figures(one, shown, self._clock(), short=True), one.detail]).strip(), style="dim")


def _display(console: Console, clock: Callable[[], float]) -> Progress:
    name = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    return Progress(SpinnerColumn(), name, _Bar(12), _Words(clock), console=console, transient=True, expand=True)


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

"""Where the commands' output goes: consoles, JSON, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outpace.core.errors import BadInput
from outpace.core.files import atomic_file, is_special

if TYPE_CHECKING:
    from outpace.bench.settings import Progress as Step

STDOUT = "-"


def out() -> Console:
    """Standard output."""
    return _console(stderr=False)


def err() -> Console:
    """Standard error: progress, status and remarks, so that standard output holds the answer alone."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110  # a log or a file: rich would assume 80 columns, and cut tables
    return console


def to_json(value: Any) -> str:
    """Strict JSON: undefined figures must be null by now, never NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(to_json(value) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def advancing() -> Iterator[Callable[[Step], None] | None]:
    """A progress bar on standard error while a bench runs, and what moves it; None where nobody watches."""
    console = err()
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def advance(now: Step) -> None:
            progress.update(task, completed=now.done, total=now.total, description=f"{now.method} {now.category}")

        yield advance


class Outputs:
    """Where a command's results go: the table to the terminal, JSON and HTML to files."""

    def __init__(self, json: str | None, html: Path | None) -> None:
        self._to_stdout = json == STDOUT
        self._json = None if json is None or self._to_stdout else Path(json)
        self._html = html

    def check(self) -> None:
        """Raise BadInput now for what could not be written later."""
        for path in (self._json, self._html):
            if path is not None:
                check_writable(path)
        if self._json is not None and self._json == self._html:
            raise BadInput(f"--json and --html both name {self._html}")

    def write(
        self,
        result: dict[str, Any],
        table: Callable[[dict[str, Any], Console], None],
        page: Callable[[dict[str, Any], Path], None],
        *,
        empty: bool,
    ) -> None:
        """Everything that was asked for; JSON first, for it is what a script waits for. ``empty``: nothing else."""
        if self._to_stdout:
            print_json(result)
        elif self._json is not None:
            write_whole(self._json, lambda path: _write_text(path, to_json(result) + "\n"))
        if empty:
            return
        if self._html is not None:
            write_whole(self._html, lambda path: page(result, path))
        table(result, err() if self._to_stdout else out())
        for what, place in (("JSON", self._json), ("report", self._html)):
            if place is not None:
                err().print(f"[dim]{what}: {place}", soft_wrap=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Raise BadInput unless a file can be written at ``path``. Called before the long run, not after it."""
    if is_special(path):
        return
    if path.is_dir():
        raise BadInput(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise BadInput(f"cannot write {path}: there is no folder {path.parent}")
    try:
        # Not os.access: it answers yes to root on a read-only file system.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a file that then appears at ``path``, whole. Raises BadInput where it cannot be written."""
    try:
        with atomic_file(path) as unfinished:
            write(unfinished)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None

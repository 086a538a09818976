"""Where the commands' output goes: consoles, JSON, and files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from outpace.cli.interrupt import Interrupted
from outpace.cli.options import option
from outpace.core.errors import BadInput
from outpace.core.files import atomic_file, is_special

if TYPE_CHECKING:
    from outpace.bench.results import Results

STDOUT = "-"
_shared: Console | None = None


def out() -> Console:
    """Standard output."""
    return _console(stderr=False)


def err() -> Console:
    """Standard error: progress, status and notes, so that standard output holds the answer alone."""
    return _shared or _console(stderr=True)


def share(console: Console | None) -> None:
    """Let :func:`err` be ``console`` while it draws a bar, so that lines appear above the bar; None ends that."""
    global _shared  # noqa: PLW0603 - the one place where it is set
    _shared = console


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110  # a log or a file: rich would assume 80 columns, and cut tables
    return console


def typed() -> str:
    """The command line, as reports note it."""
    line = shlex.join(["outpace", *sys.argv[1:]])
    return line.encode("utf-8", "replace").decode()  # names of files may be bytes that are no text


def to_json(value: Any) -> str:
    """Strict JSON: undefined figures must be null by now, never NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(to_json(value) + "\n")
    sys.stdout.flush()


def fact_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values, with markup, in two columns."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a command's results go: tables to the terminal, JSON and HTML to files."""

    json: Annotated[
        str | None, option("--json", value="FILE", text="Write the results as JSON; - is standard output.")
    ] = None
    html: Annotated[Path | None, option("--html", value="FILE", text="Write a self-contained report with charts.")] = (
        None
    )

    @property
    def _to_stdout(self) -> bool:
        return self.json == STDOUT

    @property
    def _file(self) -> Path | None:
        return None if self.json is None or self._to_stdout else Path(self.json)

    def check(self) -> None:
        """Raise BadInput now for what could not be written later."""
        for path in (self._file, self.html):
            if path is not None:
                check_writable(path)
        if self._file is not None and self._file == self.html:
            raise BadInput(f"--json and --html both name {self.html}")

    def keep(self, report: Results) -> None:
        """The JSON file alone, while the work goes on. Standard output gets one document, at the end."""
        if self._file is not None:
            write_whole(self._file, lambda path: path.write_text(to_json(report.result) + "\n", encoding="utf-8"))

    def write(self, report: Results, stopped_by: str = "") -> None:
        """Everything that was asked for; without any answer JSON alone. Raises Interrupted for partial results.

        ``stopped_by``: what ended the work, where that was not Ctrl-C.
        """
        if self._to_stdout:
            print_json(report.result)
        self.keep(report)
        shown = bool(report.rows) and (report.complete or any(row["prompts"] for row in report.rows))
        if shown:
            if self.html is not None:
                write_whole(self.html, report.write_html)
            report.print(err() if self._to_stdout else out())
            for what, place in (("JSON", self._file), ("report", self.html)):
                if place is not None:
                    err().print(f"[dim]{what}: {place}", soft_wrap=True)
        if not report.complete:
            total = report.result["settings"]["prompts"] if report.rows else 0
            raise Interrupted.partial(report.prompts_done, total, stopped_by, shown=shown)


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


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file that then appears at ``path``, whole. Raises BadInput where it cannot be written."""
    try:
        with atomic_file(path) as unfinished:
            write(unfinished)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None

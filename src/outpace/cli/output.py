"""Where the commands' output goes: consoles, JSON, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli.options import INTERRUPTED, option
from outpace.core.errors import BadInput
from outpace.core.files import share

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
    """Where a command's results go: the table to the terminal, JSON and HTML to files."""

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
        elif self._file is not None:
            write_whole(self._file, lambda path: _write_text(path, to_json(result) + "\n"))
        if empty:
            return
        if self.html is not None:
            write_whole(self.html, lambda path: page(result, path))
        table(result, err() if self._to_stdout else out())
        for what, place in (("JSON", self._file), ("report", self.html)):
            if place is not None:
                err().print(f"[dim]{what}: {place}", soft_wrap=True)


def ended(result: dict[str, Any], *, empty: bool) -> None:
    """Exit as after Ctrl-C, and say so, where a result is not complete."""
    if not result["complete"]:
        err().print("[yellow]interrupted" if empty else "[yellow]interrupted[/]: the results are partial")
        raise typer.Exit(INTERRUPTED)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Raise BadInput unless a file can be written at ``path``. Called before the long run, not after it."""
    if _is_special(path):
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
    """Let ``write`` fill a temporary file beside ``path``, then put it in place: never half a file."""
    path = path.resolve()  # through a link, to the file itself
    temporary: Path | None = None
    try:
        if _is_special(path):
            write(path)
            return
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        share(temporary)
        temporary.replace(path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """A device or a pipe: it is written to and never replaced, as /dev/null must not be."""
    return path.exists() and not path.is_file() and not path.is_dir()

"""Journal: the results of an offline batch while it runs. What is in it survives a kill, and is in it once.

The file beside the output, ``OUT.partial``, has a line that says what is computed and then a line for each result, in
the order of their arrival. A line that a kill cut short is removed when the batch goes on. At the end the results are
written to the output in the order of the input, all at once, and the journal is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from outpace.core.errors import BadInput
from outpace.core.files import atomic_file, parse_json

FORMAT = 1


class Journal:
    """Results by the input's line. ``about``: what they depend on; a batch goes on only with the same."""

    def __init__(self, output: Path, about: Mapping[str, Any], *, resume: bool) -> None:
        """Begin, or go on with ``resume``. Raises BadInput, in words, where the one or the other is impossible."""
        self.output, self.path = output, journal_path(output)
        self._about = {"format": FORMAT, **about}
        self._places: dict[int, int] = {}
        self._begun = not self.path.exists()
        self.failed: dict[int, str] = {}
        """Why lines have no answer."""
        self.lossy: str | None = None
        """What is lossy about the answers, as they say it; all have one method."""
        if output.exists():
            raise BadInput(f"{output} exists already; name another output, or remove it")
        if self.path.exists() and not resume:
            raise BadInput(
                f"{self.path} holds results of a batch that was interrupted; give --resume to continue it, or remove it"
            )
        self._file = self._open()
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    @property
    def done(self) -> frozenset[int]:
        """Lines that have a result."""
        return frozenset(self._places)

    def add(self, results: Iterable[Mapping[str, Any]]) -> int:
        """Write results to the disk; one whose line has a result already is left out. Returns how many were new."""
        new = 0
        self._file.seek(0, os.SEEK_END)
        for one in results:
            line = one["line"]
            if line in self._places:
                continue
            self._note(one, self._file.tell())
            self._file.write(_encoded(one))
            new += 1
        if new:
            self._file.flush()
            os.fsync(self._file.fileno())
        return new

    def finish(self) -> None:
        """Write the output, in the order of the input, and remove the journal."""
        with atomic_file(self.output) as place, place.open("wb") as file:
            for line in sorted(self._places):
                self._file.seek(self._places[line])
                found = json.loads(self._file.readline())
                if "error" not in found:
                    del found["line"]
                file.write(_encoded(found))
        self.close()
        self.path.unlink()

    def close(self) -> None:
        """Close the file; the journal stays for --resume."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._begun and isinstance(error, BadInput) and len(self.failed) == len(self._places):
            self.path.unlink(missing_ok=True)  # what was refused before anything was computed leaves nothing behind

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("r+b" if self.path.exists() else "w+b")
        except OSError as error:
            raise BadInput(f"cannot write {self.path}: {error.strerror}") from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"another process is writing {self.path}") from None

    def _read(self) -> None:
        """What is in the file so far, without a last line that was cut short."""
        first = self._file.readline()
        if not first.endswith(b"\n"):  # nothing, or a kill within the first line
            self._cut(0)
            self._file.write(_encoded(self._about))
            self._file.flush()
            return
        self._compare(first)
        while True:
            place = self._file.tell()
            raw = self._file.readline()
            found = _result(raw)
            if found is None:
                self._cut(place)
                return
            self._note(found, place)

    def _note(self, found: Mapping[str, Any], place: int) -> None:
        self._places[found["line"]] = place
        if "error" in found:
            self.failed[found["line"]] = found["error"]
        self.lossy = found.get("lossy", self.lossy)

    def _cut(self, place: int) -> None:
        self._file.seek(place)
        self._file.truncate()

    def _compare(self, first: bytes) -> None:
        try:
            before = parse_json(first)
        except ValueError:
            before = None
        if not isinstance(before, dict) or before.get("format") != FORMAT:
            raise BadInput(f"{self.path} is no journal of this version of outpace; remove it")
        now = json.loads(json.dumps(self._about))
        other = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if other:
            raise BadInput(
                f"{self.path} was begun with another {', '.join(other)}; --resume continues with the same input and "
                "options only"
            )


def journal_path(output: Path) -> Path:
    """Where the results are until all are there."""
    return output.with_name(f"{output.name}.partial")


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _result(raw: bytes) -> dict[str, Any] | None:
    """A result's line; None for one that is not whole."""
    if not raw.endswith(b"\n"):
        return None
    try:
        found = parse_json(raw)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("line"), int) else None

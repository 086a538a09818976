"""Parts of a study that are complete, kept in a folder: a run that was ended goes on, and may be bounded in time.

A study plans its parts and asks the journal for each; what is in the folder already is not measured again. Without a
folder every part is measured, and nothing is kept.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from outpace.core.errors import BadInput
from outpace.core.files import read_json, write_atomically

T = TypeVar("T")

_ABOUT = "study.json"
_LEAST = 60.0
"""Seconds."""


class StudyPaused(KeyboardInterrupt):
    """The time is over, or Ctrl-C was pressed; what it says tells how to go on. Training saves its state at it, as at
    any KeyboardInterrupt."""


class StudyJournal:
    """``folder``: where parts are kept; None: nowhere. ``minutes``: of this run; a part that is under way ends first,
    and one is always done. ``tell``: is told of each part in a line. ``clock``: seconds."""

    def __init__(
        self,
        folder: Path | None = None,
        minutes: float | None = None,
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if minutes is not None and not 0 < minutes < float("inf"):
            raise BadInput(f"--max-minutes must be above 0, not {minutes:g}")
        if minutes is not None and folder is None:
            raise BadInput("--max-minutes needs --keep FOLDER, in which what was done until then is kept")
        self._folder, self._tell, self._clock = folder, tell, clock
        self._limit = float("inf") if minutes is None else 60.0 * minutes
        self._began = clock()
        self._weights: dict[str, float] = {}
        self._done: set[str] = set()
        self._spent = self._measured = 0.0
        self.earlier_seconds = 0.0
        """Of the parts that earlier runs have measured."""

    @property
    def keeps(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def open(self, about: Mapping[str, Any]) -> None:
        """``about``: what the parts depend on. Raises BadInput for a folder of something else, or that cannot be
        written."""
        if self._folder is None:
            return
        path, said = self._folder / _ABOUT, json.loads(json.dumps(dict(about), default=str))
        if path.exists():
            found = _read(path)
            differing = [name for name in {**found, **said} if found.get(name) != said.get(name)]
            if differing:
                raise BadInput(
                    f"--keep {self._folder} holds parts of a study with another {', '.join(sorted(differing))}; name "
                    "another folder, or repeat the command that began it"
                )
            return
        try:
            self._folder.mkdir(exist_ok=True)
            if any(self._folder.iterdir()):
                raise BadInput(f"--keep {self._folder}: the folder holds other files; name a new one")
            write_atomically(path, (json.dumps(said) + "\n").encode())
        except OSError as error:
            raise BadInput(f"cannot write to --keep {self._folder}: {error.strerror or error}") from None

    def plan(self, parts: Mapping[str, float]) -> None:
        """Parts that will be asked for, with how long each takes in proportion."""
        self._weights |= parts
        if self._folder is not None:
            self._done |= {name for name in parts if self._path(name).exists()}

    def part(
        self,
        name: str,
        work: Callable[[], T],
        pack: Callable[[T], Any] = lambda found: found,
        unpack: Callable[[Any], T] = lambda found: found,
    ) -> T:
        """What ``work`` finds, or found in an earlier run. ``pack``: into what JSON holds, ``unpack``: from it.

        Raises StudyPaused instead of beginning a part when the time is over.
        """
        if self._folder is None:
            return work()
        path = self._path(name)
        if path.exists():
            kept = _read(path)
            self._done.add(name)
            self.earlier_seconds += kept["seconds"]
            return unpack(kept["value"])
        if self._measured and self._elapsed > self._limit:
            raise self.paused("the time is over")
        began = self._clock()
        found = work()
        seconds = self._clock() - began
        packed = json.dumps({"part": name, "seconds": seconds, "value": pack(found)}) + "\n"
        try:
            write_atomically(path, packed.encode())
        except OSError as error:
            raise BadInput(f"cannot write to --keep {self._folder}: {error.strerror or error}") from None
        self._done.add(name)
        self._spent, self._measured = self._spent + seconds, self._measured + self._weights.setdefault(name, 1.0)
        self._tell(f"{self._counted} parts done ({name}), {seconds:.0f} s; about {self._left / 60:.0f} min left")
        return found

    def check(self) -> None:
        """Raise StudyPaused where the time is over. For what takes long within a part and keeps its own state; a run
        has a minute at least, since a state that is saved too early would never grow."""
        if self._elapsed > max(self._limit, _LEAST):
            raise self.paused("the time is over")

    def paused(self, why: str) -> StudyPaused:
        """What to raise, or print, when the run ends early."""
        if self._folder is None:
            return StudyPaused("")
        return StudyPaused(f"{why}; {self._counted} parts done, kept in {self._folder}; the same command goes on")

    @contextmanager
    def room(self, name: str) -> Iterator[Path]:
        """A folder for what is no JSON: kept beside the parts, or temporary."""
        if self._folder is None:
            with TemporaryDirectory() as passing:
                yield Path(passing)
            return
        place = self._folder / name
        place.mkdir(exist_ok=True)
        yield place

    @property
    def _elapsed(self) -> float:
        return self._clock() - self._began

    @property
    def _counted(self) -> str:
        return f"{len(self._done)} of {len(self._weights)}"

    @property
    def _left(self) -> float:
        """Seconds that remain, as the parts of this run have taken."""
        weight = sum(each for name, each in self._weights.items() if name not in self._done)
        return weight * self._spent / self._measured if self._measured else 0.0

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / (re.sub(r"[^A-Za-z0-9.]+", "-", name) + ".part.json")


def _read(path: Path) -> dict[str, Any]:
    """Raises BadInput for a file that is damaged."""
    try:
        return read_json(path)
    except BadInput as error:
        raise BadInput(f"{error}; delete the file to measure this part again") from None

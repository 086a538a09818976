"""Cells of a long measurement: a line each in a file, so that a run that was ended goes on, within a time limit."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from outpace.core.errors import BadInput
from outpace.core.files import read_json, write_atomically
from outpace.core.version import __version__

C = TypeVar("C", bound=Hashable)


def cell_options(parser: argparse.ArgumentParser, one: str) -> None:
    """Options of every such measurement. ``one``: what a cell is called."""
    parser.add_argument("--out", type=Path, required=True, help=f"file of {one}s, a line each; a second run goes on")
    parser.add_argument("--max-minutes", type=float, help=f"end after the {one} in which this time is over")
    parser.add_argument("--table", action="store_true", help="print the table of what is there and measure nothing")


def models_and_drafts(names: Sequence[str]) -> dict[str, str | None]:
    """From MODEL or MODEL=DRAFT to the model's draft model."""
    found: dict[str, str | None] = {}
    for text in names:
        name, sign, draft = text.partition("=")
        if not name or (sign and not draft) or name in found:
            raise BadInput(f"--models takes MODEL or MODEL=DRAFT, each model once, not '{text}'")
        found[name] = draft or None
    return found


def model_label(model: str) -> str:
    """A model's name in tables and names of files: of a path its last part, and all of it behind the hub's owner."""
    return Path(model).name.removesuffix(".gguf")


def numbers(option: str, text: str) -> list[int]:
    """Of at least 1, from a list with commas."""
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise BadInput(f"{option} takes numbers of at least 1, such as 1,4,16, not '{text}'")
    return list(dict.fromkeys(found))


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a file; a last line that was cut off is left out. Raises BadInput for another that is none."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            one = json.loads(line)
        except ValueError:
            if number == len(lines) and not text.endswith("\n"):
                break
            raise BadInput(f"{path}, line {number}: not JSON; delete the line to measure it again") from None
        if not isinstance(one, dict):
            raise BadInput(f"{path}, line {number}: no JSON object; delete the line to measure it again")
        found.append(one)
    return found


def append_cell(path: Path, one: Mapping[str, Any]) -> None:
    """Add a line, in place of one that was cut off."""
    before = path.read_bytes() if path.exists() else b""
    whole = before.rfind(b"\n") + 1
    if whole < len(before):
        write_atomically(path, before[:whole])
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(one) + "\n")


def check_settings(
    out: Path, said: Mapping[str, Any], models: Mapping[str, Any], done: Sequence[Mapping[str, Any]]
) -> None:
    """Keep beside ``out`` what its cells depend on: the version and ``said`` all of them, and what is said of their
    model in ``models``; further models may be added. Raises BadInput where those that are ``done`` had other
    settings."""
    path = out.with_suffix(".settings.json")
    whole = {**said, "version": __version__, **{f"draft of {name}": about for name, about in models.items()}}
    said = json.loads(json.dumps(whole))  # as it is read again
    known = read_json(path) if path.exists() else {}
    new = {f"draft of {name}" for name in models} - {f"draft of {one['model']}" for one in done}
    if differing := sorted(name for name in said if done and name not in new and known.get(name) != said[name]):
        raise BadInput(
            f"--out {out} holds cells with another {', '.join(differing)}; name another file, or repeat the "
            "command that began it"
        )
    write_atomically(path, json.dumps({**known, **said}).encode())


def digest_of(value: Any) -> str:
    """Tells values apart that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


class CellRun:
    """The cells that are left, within ``minutes``. ``spent``: seconds of those that are done, by what a cell is like;
    the time that is left is told from those that are most alike. ``tell``: a line of progress."""

    def __init__(
        self,
        minutes: float | None,
        tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if minutes is not None and not minutes > 0:
            raise BadInput(f"--max-minutes must be above 0, not {minutes:g}")
        self._limit = float("inf") if minutes is None else 60.0 * minutes
        self._tell, self._clock, self._began = tell, clock, clock()
        self._spent: dict[Any, list[float]] = {}

    def known(self, alike: Hashable, seconds: float | None) -> None:
        """How long a cell took that is ``alike``."""
        if seconds is not None:
            self._spent.setdefault(alike, []).append(seconds)

    def each(self, wanted: Sequence[C], done: Callable[[C], bool], alike: Callable[[C], Hashable]) -> Iterator[C]:
        """The cells that are not done, until the time is over. One is always begun."""
        left = [one for one in wanted if not done(one)]
        self._tell(f"{len(wanted) - len(left)} of {len(wanted)} done{self._remaining(left, alike)}")
        for number, one in enumerate(left):
            if number and self._clock() - self._began > self._limit:
                self._tell(f"the time is over; {len(left) - number} left, the same command goes on")
                return
            began = self._clock()
            yield one
            seconds = self._clock() - began
            if done(one):
                self.known(alike(one), seconds)
            rest = left[number + 1 :]
            done_so_far = len(wanted) - len(rest)
            self._tell(f"{done_so_far} of {len(wanted)}: {seconds:.0f} s{self._remaining(rest, alike)}")

    def _remaining(self, left: Sequence[C], alike: Callable[[C], Hashable]) -> str:
        """What the cells that are left will take, from those that were alike; else from all."""
        every = [seconds for some in self._spent.values() for seconds in some]
        if not left or not every:
            return ""
        seconds = sum(mean(self._spent.get(alike(one), every)) for one in left)
        return f", about {seconds / 60:.0f} min left"

"""Progress of long work: whoever does it says where it stands, and a reporter, if one is installed, shows it.

    with stage("converting", total=len(tensors), unit="tensors") as at:
        for number, tensor in enumerate(tensors, 1):
            ...
            at.move(number)

Without a reporter this costs next to nothing. The command line installs one (:mod:`outpace.cli.bars`); other programs
may install theirs with :func:`reporting`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(eq=False, slots=True)
class Stage:
    """A stretch of work with a name. ``done`` of ``total`` are counted in ``unit`` ("tokens", "B" for bytes).

    ``total`` None: not known. ``detail``: what is being done now, in a few words. ``brief``: usually over in seconds,
    so that a log need not mention it. ``inner``: shown only within another stage, because it may also happen while an
    answer is being printed.
    """

    name: str
    total: float | None = None
    unit: str = ""
    brief: bool = False
    inner: bool = False
    done: float = 0
    detail: str = ""
    _reporter: Reporter | None = field(default=None, repr=False)

    def move(self, done: float | None = None, total: float | None = None, detail: str | None = None) -> None:
        """Say where the work stands; what is None stays as it was."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.detail = self.detail if detail is None else detail
        if self._reporter is not None:
            self._reporter.moved(self)


class Reporter(Protocol):
    """What shows stages. Stages may be nested, and a thread may move one while another stage begins."""

    def began(self, stage: Stage, /) -> None: ...

    def moved(self, stage: Stage, /) -> None: ...

    def ended(self, stage: Stage, /) -> None:
        """Also called where the work raised."""
        ...


_reporter: Reporter | None = None
"""The process's: libraries report from threads of their own."""


@contextmanager
def stage(
    name: str, total: float | None = None, unit: str = "", *, brief: bool = False, inner: bool = False
) -> Iterator[Stage]:
    """A stage that lasts as long as the context."""
    one = Stage(name, total, unit, brief, inner, _reporter=_reporter)
    shown = _reporter
    if shown is not None:
        shown.began(one)
    try:
        yield one
    finally:
        if shown is not None:
            shown.ended(one)


@contextmanager
def reporting(reporter: Reporter) -> Iterator[None]:
    """Let ``reporter`` show every stage that begins inside, in the whole process."""
    global _reporter  # noqa: PLW0603 - the one place where it is set
    before, _reporter = _reporter, reporter
    try:
        yield
    finally:
        _reporter = before

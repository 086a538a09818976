"""What a comparison tells while it runs."""

from __future__ import annotations

from typing import Protocol

from outpace.bench.peers.entries import Entry
from outpace.bench.peers.peers_report import PeersReport
from outpace.bench.settings import Progress


class Observer(Protocol):
    """Is told what happens."""

    def progress(self, now: Progress, /) -> None:
        """Before every answer, and before a library is loaded."""

    def note(self, text: str, /) -> None:
        """Something that the user should know now."""

    def row(self, entry: Entry, /) -> None:
        """A row has answered its last prompt, or failed."""

    def results(self, report: PeersReport, /) -> None:
        """The results so far: before the first answer, after every row and after every prompt."""


class Silent:
    """An observer that does nothing."""

    def progress(self, now: Progress) -> None: ...

    def note(self, text: str) -> None: ...

    def row(self, entry: Entry) -> None: ...

    def results(self, report: PeersReport) -> None: ...

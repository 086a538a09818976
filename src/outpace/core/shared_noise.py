"""SharedNoise: numbers of a position that a drafter and a rule both draw with, so that they tend to draw one token."""

from __future__ import annotations

from outpace.core.chance import Chance, ChanceSource

SHARED_NOISE = "shared noise"
"""The purpose of its streams."""


class SharedNoise:
    """One stream for each position of one request's text, opened once, for :meth:`Chance.race`.

    Position i is that of the token with index i in the sequence, prompt included, whatever round it is drawn in.
    """

    def __init__(self) -> None:
        self._streams: dict[int, Chance] = {}

    def at(self, source: ChanceSource, position: int) -> Chance:
        """The stream of a position; ``source``: the request's chance."""
        stream = self._streams.get(position)
        if stream is None:
            stream = self._streams[position] = source.at(position, SHARED_NOISE)
        return stream

    def forget(self, before: int | None = None) -> None:
        """Drop what is kept of positions ``before`` one (None: of all): a stream that is opened again is the same."""
        self._streams = {at: one for at, one in self._streams.items() if before is not None and at >= before}

"""Alignment: where in its source texts a growing output stands, found again after every edit."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence as Seq
from typing import Any

from outpace.drafting.copying import separated
from outpace.targets.base import Sequence

TRUSTED = 2
"""Tokens in a row that must agree before a place counts as found: one alone may be chance."""
SURE = 8
"""Matching tokens beyond these do not count: of places with so many the nearest is taken."""
FAR = 0.5
"""What is taken from a place's score for every doubling of its distance."""
MARGIN = 0.3
"""How much higher than every other the score of a place must be for it to be taken."""
_MOST = 256
"""Most places that are compared."""


class Alignment:
    """Where in its sources a growing output stands.

    ``started``: it begins at the beginning of the first source; otherwise its place is searched as after an edit.
    ``min_match``: tokens that must match to resume near the last place; elsewhere one more is required. ``window``:
    how many tokens from the last place count as near. ``realign=False``: a lost place is not searched.
    """

    def __init__(
        self,
        sources: Iterable[Seq[int]],
        *,
        started: bool = True,
        min_match: int = 1,
        window: int = 64,
        realign: bool = True,
    ) -> None:
        self.text = separated(sources)
        self.min_match, self.window, self.realign = min_match, window, realign
        self.cursor: int | None = 0 if started else None
        """The place of the token that should come next; None while the output is off its source."""
        self.matched = 0
        """Tokens up to the cursor that agree with the end of the output."""
        self._lost_at = 0 if started else None
        """The last place that counted as found."""
        self._since = 0
        """Tokens written since."""
        self._output: list[int] = []
        self._after: dict[tuple[int, ...], list[int]] = {}
        """Places after every token and every n-gram of ``min_match + 1`` tokens, in ascending order."""
        for at in range(1, len(self.text)):
            for length in {1, min_match + 1}:
                if at >= length:
                    self._after.setdefault(tuple(self.text[at - length : at]), []).append(at)

    @classmethod
    def of(cls, sequence: Sequence, **options: Any) -> Alignment:
        """In a request's references, or in its prompt where there are none. ``options``: those of the constructor."""
        return cls(sequence.references or (sequence.tokens[: sequence.prompt_length],), **options)

    def advance(self, tokens: Iterable[int]) -> None:
        """Take in the tokens that the output goes on with."""
        for token in tokens:
            self._output.append(token)
            if self.cursor is not None and self.text[self.cursor : self.cursor + 1] == [token]:
                self.cursor += 1
                self.matched += 1
            else:
                self.cursor, self.matched = None, 0
            self._since += 1
            if self.cursor is None and self.realign:
                self._search()
            if self.cursor is not None and self.matched >= TRUSTED:
                self._lost_at, self._since = self.cursor, 0

    def _search(self) -> None:
        """Find the place that the end of the output matches: near where it should be, or anywhere."""
        near = self._near()
        for places, least in ((near, self.min_match), (self._places(self.min_match + 1), self.min_match + 1)):
            ranked = sorted(((self._score(place), place) for place in places[:_MOST]), reverse=True)
            if not ranked or (len(ranked) > 1 and ranked[0][0] - ranked[1][0] < MARGIN):
                continue
            place = ranked[0][1]
            matched = self._agreement(place)
            if matched >= least:
                self.cursor, self.matched = place, matched
                return

    def _near(self) -> list[int]:
        """Places around the last one, and around where the output is by now, that its last token matches."""
        if self._lost_at is None:
            return []
        return self._places(1, self._lost_at - self.window, self._lost_at + self._since + self.window)

    def _places(self, length: int, low: int = 0, high: int | None = None) -> list[int]:
        """Places from ``low`` to ``high`` after the last ``length`` tokens of the output."""
        found = self._after.get(tuple(self._output[-length:]), [])
        if high is None:
            return found
        return found[bisect_left(found, low) : bisect_right(found, high)]

    def _score(self, place: int) -> float:
        """Matching tokens, less ``FAR`` for every doubling of the distance from where the output should be."""
        low = self._lost_at or 0
        away = max(low - place, place - low - self._since, 0)
        return self._agreement(place) - FAR * math.log2(1 + away)

    def guess(self) -> int | None:
        """The likeliest place while none is certain: the best match near by, or as if every new token replaced one."""
        if not self.realign or self._lost_at is None:
            return None
        here = self._lost_at + self._since
        place = max(self._near()[:_MOST], key=self._score, default=here)
        return place if place < len(self.text) else None

    def _agreement(self, place: int) -> int:
        """Tokens before a place that agree with the end of the output, up to ``SURE``."""
        output, text = self._output, self.text
        length = 0
        while length < min(SURE, len(output), place) and text[place - 1 - length] == output[-1 - length]:
            length += 1
        return length

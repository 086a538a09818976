"""Copying with a place in the source: draft what comes next there, and find the place again after an edit.

Shallow aggressive decoding (``sad``; Sun et al. 2021, arXiv 2106.04970) corrects a text by drafting the text itself.
Where the answer departs from it, plain steps follow until the last tokens written match the source in one place only:
there copying resumes. A word was inserted, dropped or replaced, and the answer goes on with what comes after it.

Lookup by n-grams forgets where it was: after words that the source repeats it copies from whichever place it prefers.
An alignment knows its place, and looks near it first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from pydantic import BaseModel, ConfigDict, Field

from outpace.drafters.copying import CopyDrafter, CopyKind, Length, Match, length_controller, separated
from outpace.method import Context, Parts, register
from outpace.targets.base import Sequence

NEAR = 8
"""A place within so many tokens of where the output should be is looked for first."""
TRUSTED = 2
"""Tokens in a row that must agree before a place is believed: one alone may be chance."""
SURE = 8
"""Of several places that match this many tokens the nearest is taken: the source repeats itself, and so may go on."""


class Alignment:
    """Where in its sources a growing output stands.

    ``started``: it begins at the beginning of the first source; otherwise its place is found as after an edit.
    ``min_match``: tokens that must match to resume near the last place; elsewhere one more is asked for. ``window``:
    how far from the last place is near. ``realign=False``: once lost, lost.
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
        """The last place that was believed in."""
        self._since = 0
        """Tokens written since then."""
        self._output: list[int] = []
        self._after: dict[tuple[int, ...], list[int]] = {}
        """Places after every token and after every longer n-gram that is asked for elsewhere, in ascending order."""
        for at in range(1, len(self.text)):
            for length in {1, min_match + 1}:
                if at >= length:
                    self._after.setdefault(tuple(self.text[at - length : at]), []).append(at)

    def advance(self, tokens: Iterable[int]) -> None:
        """The output goes on."""
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
        """Find the one place that matches the end of the output: near where it should be, or anywhere."""
        if self._lost_at is not None:
            here = self._lost_at + self._since  # if each token written stands for one of the source
            first, last = min(self._lost_at, here), max(self._lost_at, here)
            for radius in (NEAR, self.window):
                if self._settle(self._places(1, first - radius, last + radius), here, self.min_match):
                    return
        self._settle(self._places(self.min_match + 1), self._lost_at or 0, self.min_match + 1)

    def _places(self, length: int, low: int = 0, high: int | None = None) -> list[int]:
        """Places from ``low`` to ``high`` after the last ``length`` tokens of the output."""
        found = self._after.get(tuple(self._output[-length:]), [])
        if high is None:
            return found
        return found[bisect_left(found, low) : bisect_right(found, high)]

    def _settle(self, places: Seq[int], here: int, least: int) -> bool:
        """Take the place that matches more tokens than any other, if it is one and these are enough."""
        best, runner_up, chosen = 0, 0, 0
        for place in sorted(places, key=lambda place: abs(place - here))[: 4 * self.window]:
            length = self._agreement(place)
            if length > best:
                best, runner_up, chosen = length, best, place
            else:
                runner_up = max(runner_up, length)
        if best < least or (best == runner_up and best < SURE):
            return False
        self.cursor, self.matched = chosen, best
        return True

    def _agreement(self, place: int) -> int:
        """Tokens before a place that agree with the end of the output, no more than decide."""
        output, text = self._output, self.text
        length = 0
        while length < min(SURE, len(output), place) and text[place - 1 - length] == output[-1 - length]:
            length += 1
        return length


class AlignedCopy(CopyDrafter):
    """Drafts the source from where the output stands in it: the references, or the prompt where there are none."""

    def __init__(self, min_match: int = 1, window: int = 64, *, realign: bool = True) -> None:
        super().__init__()
        self.min_match, self.window, self.realign = min_match, window, realign
        self._alignments: dict[Sequence, Alignment] = {}
        self._fed: dict[Sequence, int] = {}

    def prior(self, kind: CopyKind) -> float:
        return 1.0 - 0.4 / math.pow(1.0 + kind[1], 0.8)

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        # A prompt says what to do before it comes to the text, so where the text begins is not known.
        self._alignments[sequence] = Alignment(
            sequence.references or (sequence.tokens,),
            started=bool(sequence.references),
            min_match=self.min_match,
            window=self.window,
            realign=self.realign,
        )
        self._fed[sequence] = sequence.prompt_length

    def match(self, sequence: Sequence) -> Match | None:
        alignment = self._alignments[sequence]
        alignment.advance(sequence.tokens[self._fed[sequence] :])
        self._fed[sequence] = len(sequence.tokens)
        if alignment.cursor is None:
            return None
        return Match(alignment.text, alignment.cursor, alignment.matched, periodic=False)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._alignments.pop(sequence, None)
        self._fed.pop(sequence, None)


class SadSettings(BaseModel):
    """Settings of ``sad``."""

    model_config = ConfigDict(extra="forbid")

    length: Length = None
    min_match: int = Field(1, ge=1, le=64, description="tokens that must match to resume copying after an edit")
    window: int = Field(64, ge=1, le=4096, description="tokens around the last place that are searched first")
    realign: bool = Field(True, description="resume copying after an edit; without, the first edit ends it")


@register(
    "sad",
    family="model-free",
    paper="Sun et al. 2021, arXiv 2106.04970",
    summary="Drafts the reference (or the prompt) itself and finds its place in it again after every edit.",
    pays="Where a text is corrected or code is edited: most of the answer is the source. Not where it is only quoted.",
    aliases=("shallow-aggressive",),
    tiny={"length": 2},
)
def build(context: Context, settings: SadSettings) -> Parts:
    """The source as the draft, re-aligned after edits."""
    drafter = AlignedCopy(settings.min_match, settings.window, realign=settings.realign)
    return Parts(drafter, length_controller(context.target, settings.length))

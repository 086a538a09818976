"""Copying with a place in the source: draft what comes next there, and find the place again after an edit.

Shallow aggressive decoding (``sad``; Sun et al. 2021, arXiv 2106.04970) corrects a text by drafting the text itself.
Where the answer departs from it, plain steps follow until the last tokens written match the source in one place only:
there copying resumes. A word was inserted, dropped or replaced, and the answer goes on with what comes after it. Of
places that match alike the one counts that is near: words come again, but edits are small.

Lookup by n-grams forgets where it was: after words that the source repeats it copies from whichever place it prefers.
An alignment knows its place, and looks near it first. Beside the paper: while the place is in doubt the likeliest one
is drafted from as a guess, which has a rate of its own and is left out where it does not pay.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from outpace.drafting.alignment import Alignment
from outpace.drafting.copying import CopyDrafter, CopyKind, Length, Match, length_controller
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence

GUESSED = "guess"


class AlignedCopy(CopyDrafter):
    """Drafts the source from where the output stands in it: the references, or the prompt where there are none."""

    def __init__(self, min_match: int = 1, window: int = 64, *, realign: bool = True, guess: bool = True) -> None:
        super().__init__()
        self.min_match, self.window, self.realign, self.guess = min_match, window, realign, guess
        self._alignments: dict[Sequence, Alignment] = {}
        self._fed: dict[Sequence, int] = {}

    def prior(self, kind: CopyKind) -> float:
        return 0.35 if kind == (GUESSED, 0) else 1.0 - 0.4 / math.pow(1.0 + kind[1], 0.8)

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        # A prompt says what to do before it comes to the text, so where the text begins is not known.
        self._alignments[sequence] = Alignment(
            sequence.references or (sequence.tokens[: sequence.prompt_length],),
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
        if alignment.cursor is not None:
            return Match(alignment.text, alignment.cursor, alignment.matched, periodic=False)
        place = alignment.guess() if self.guess else None
        return None if place is None else Match(alignment.text, place, 0, periodic=False, origin=GUESSED)

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
    guess: bool = Field(True, description="draft from the likeliest place while the place is in doubt")


@register(
    "sad",
    family="model-free",
    paper="Sun et al. 2021, arXiv 2106.04970",
    summary="Drafts the reference (or the prompt) itself and finds its place in it again after every edit.",
    when_to_use="Where a text is corrected or code is edited: most of the answer is the source. Not where it is only "
    "quoted.",
    aliases=("shallow-aggressive",),
    needs=("reference",),
    tiny={"length": 2},
)
def build(context: Context, settings: SadSettings) -> Parts:
    """The source as the draft, re-aligned after edits."""
    drafter = AlignedCopy(settings.min_match, settings.window, realign=settings.realign, guess=settings.guess)
    return Parts(drafter, length_controller(context.target, settings.length))

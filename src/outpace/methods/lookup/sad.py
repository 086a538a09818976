"""Copying that keeps its place in the source and finds it again after every edit.

Shallow aggressive decoding (``sad``; Sun et al. 2021, arXiv 2106.04970) corrects a text by drafting the text itself.
Where the answer departs from it, autoregressive steps follow until the last tokens match the source in one place only:
there copying resumes. A word was inserted, dropped or replaced, and the answer goes on with what comes after it. Of
places that match equally well the nearest is taken: words come again, but edits are small.

Lookup by n-grams does not know where it was: after words that the source repeats it copies from whichever occurrence
it prefers. Beside the paper: while the place is in doubt the likeliest one is drafted from as a guess. Guesses have an
acceptance rate of their own and are left out where it is too low for their cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from outpace.core.validation import StrictModel
from outpace.drafting.alignment import Alignment
from outpace.drafting.calibration import Calibration
from outpace.drafting.copying import CopyDrafter, CopyKind, CopyState, Match, NumDraftTokens, length_controller
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence

GUESSED = "guess"


@dataclass(slots=True, kw_only=True)
class AlignedState(CopyState):
    """The place in the source."""

    alignment: Alignment


class AlignedCopy(CopyDrafter[AlignedState]):
    """Drafts the source from where the output stands in it: the references, or the prompt where there are none."""

    def __init__(self, min_match: int = 1, window: int = 64, *, realign: bool = True, guess: bool = True) -> None:
        self.min_match, self.window, self.realign, self.guess = min_match, window, realign, guess

    def prior(self, kind: CopyKind) -> float:
        return 0.35 if kind == CopyKind(GUESSED, 0) else 1.0 - 0.4 / math.pow(1.0 + kind.length, 0.8)

    def begin(self, sequence: Sequence) -> AlignedState:
        alignment = Alignment.of(
            sequence,
            # A prompt begins with instructions, so where the text begins in it is not known.
            started=bool(sequence.references),
            min_match=self.min_match,
            window=self.window,
            realign=self.realign,
        )
        return AlignedState(sequence, Calibration(self.prior), sequence.prompt_length, alignment=alignment)

    def match(self, state: AlignedState) -> Match | None:
        alignment = state.alignment
        alignment.advance(state.fresh())
        if alignment.cursor is not None:
            return Match(alignment.text, alignment.cursor, alignment.matched, periodic=False)
        place = alignment.guess() if self.guess else None
        return None if place is None else Match(alignment.text, place, 0, periodic=False, origin=GUESSED)


class SadSettings(StrictModel):
    """Settings of ``sad``."""

    num_draft_tokens: NumDraftTokens = None
    min_match: int = Field(1, ge=1, le=64, description="tokens that must match to resume copying after an edit")
    window: int = Field(64, ge=1, le=4096, description="tokens around the last position that are searched first")
    realign: bool = Field(True, description="resume copying after an edit; otherwise the first edit ends it")
    guess: bool = Field(True, description="draft from the most probable position while the position is uncertain")


@register(
    "sad",
    family="model-free",
    paper="Sun et al. 2021, arXiv 2106.04970",
    needs=("reference",),
    summary="Drafts the reference (or the prompt) itself and resumes after every edit.",
    when_to_use="Corrections of text or edits of code, where most of the answer is the source. Not where the "
    "source is only quoted.",
    aliases=("shallow-aggressive",),
    tiny={"num_draft_tokens": 2},
)
def build(context: Context, settings: SadSettings) -> Parts:
    """The source as the draft, re-aligned after edits."""
    drafter = AlignedCopy(settings.min_match, settings.window, realign=settings.realign, guess=settings.guess)
    return Parts(drafter, length_controller(context.target, settings.num_draft_tokens))

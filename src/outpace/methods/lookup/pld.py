"""Prompt lookup: copy what followed the last few tokens where they occurred before.

``pld`` (prompt lookup decoding, Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) looks the last n tokens
up in everything written so far, longest n first: reference texts, prompt and output. ``llma.py`` uses the same drafter
on reference texts alone.

The index maps every n-gram to the position after it, and grows with the tokens that arrive: a round costs a few
microseconds whatever the length of the text. Of equal n-grams the latest is preferred: on chat, translation,
summaries, retrieval and code more of its tokens are accepted than of the earliest; n-grams longer than three add next
to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from pydantic import Field, model_validator

from outpace.core.validation import StrictModel
from outpace.drafting.alignment import Alignment
from outpace.drafting.calibration import PooledCalibration
from outpace.drafting.copying import CopyDrafter, CopyState, Match, NumDraftTokens, length_controller, separated
from outpace.drafting.ngram_index import NgramIndex, Prefer
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence


@dataclass(slots=True, kw_only=True)
class LookupState(CopyState):
    """The n-grams of the texts that are searched, and the place in the references where that is kept."""

    index: NgramIndex
    alignment: Alignment | None = None


class PromptLookup(CopyDrafter[LookupState]):
    """N-gram lookup.

    ``own_text``: search prompt and output beside the references (pld), or the references alone, the prompt where there
    are none (llma). ``align``: keep the place in these, and look n-grams up only where it is lost.
    """

    def __init__(
        self, min_ngram: int, max_ngram: int, prefer: Prefer = "latest", *, own_text: bool = True, align: bool = False
    ) -> None:
        self.min_ngram, self.max_ngram, self.prefer, self.own_text = min_ngram, max_ngram, prefer, own_text
        self.align = align

    def begin(self, sequence: Sequence) -> LookupState:
        index = NgramIndex(self.min_ngram, self.max_ngram, self.prefer)
        index.extend(separated(sequence.references))
        if self.own_text:
            index.extend(sequence.tokens)
        elif not sequence.references:
            index.extend(sequence.tokens[: sequence.prompt_length])
        alignment = Alignment.of(sequence, started=False) if self.align else None
        fed = len(sequence.tokens)
        return LookupState(
            sequence, PooledCalibration(self.prior, attrgetter("origin")), fed, index=index, alignment=alignment
        )

    def match(self, state: LookupState) -> Match | None:
        index, place, fresh = state.index, state.alignment, state.fresh()
        if self.own_text:
            index.extend(fresh)
        if place is not None:
            place.advance(fresh)
            if place.cursor is not None:
                return Match(place.text, place.cursor, place.matched, periodic=False, origin="aligned")
        found = index.find(state.sequence.tokens[-self.max_ngram :])
        return None if found is None else Match(index.text, *found, periodic=self.own_text)


class LookupSettings(StrictModel):
    """Settings of ``pld`` and ``llma``."""

    num_draft_tokens: NumDraftTokens = None
    min_ngram: int = Field(1, ge=1, le=64, description="shortest suffix that is looked up")
    max_ngram: int = Field(3, ge=1, le=64, description="longest suffix that is looked up; it is tried first")
    prefer: Prefer = Field("latest", description="which occurrence of an n-gram to copy from")

    @model_validator(mode="after")
    def _ordered(self) -> LookupSettings:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram ({self.min_ngram}) must not exceed max_ngram ({self.max_ngram})")
        return self


@register(
    "pld",
    family="model-free",
    paper="Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding",
    summary="Copies what followed the last n tokens earlier in prompt, output or references.",
    when_to_use="Answers that repeat their prompt or themselves: summaries, retrieval, edits. Little gain in free "
    "prose.",
    aliases=("prompt-lookup", "prompt-lookup-decoding", "ngram"),
)
def build_pld(context: Context, settings: LookupSettings) -> Parts:
    """N-gram lookup in all text so far."""
    drafter = PromptLookup(settings.min_ngram, settings.max_ngram, settings.prefer)
    return Parts(drafter, length_controller(context.target, settings.num_draft_tokens))

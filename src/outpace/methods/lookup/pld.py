"""Prompt lookup: copy what followed the last few tokens where they occurred before.

``pld`` (prompt lookup decoding, Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) looks the last n tokens
up in everything written so far, longest n first: reference texts, prompt and output. ``llma`` (Inference with
Reference, Yang et al. 2023, arXiv 2304.04487) looks them up in the reference texts alone, or in the prompt when none
are given, and keeps its place there, so that words which the references repeat do not lead it astray (``aligned.py``).

The index maps every n-gram to the position after it, and grows with the tokens that arrive: a round costs a few
microseconds whatever the length of the text. Of equal n-grams the latest is preferred: on chat, translation,
summaries, retrieval and code it accepts more than the earliest; n-grams longer than three add next to nothing.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outpace.drafting.alignment import Alignment
from outpace.drafting.copying import CopyDrafter, Length, Match, length_controller, separated
from outpace.drafting.ngram_index import NgramIndex, Prefer
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence


class PromptLookup(CopyDrafter):
    """N-gram lookup. ``own_text``: whether prompt and output are searched beside the references (pld), or the
    references alone, the prompt where there are none (llma). ``align``: whether the place in these is kept, and n-grams
    are looked up only where it is lost."""

    def __init__(
        self, min_ngram: int, max_ngram: int, prefer: Prefer = "latest", *, own_text: bool = True, align: bool = False
    ) -> None:
        super().__init__()
        self.min_ngram, self.max_ngram, self.prefer, self.own_text = min_ngram, max_ngram, prefer, own_text
        self.align = align
        self._indices: dict[Sequence, NgramIndex] = {}
        self._alignments: dict[Sequence, Alignment] = {}
        self._fed: dict[Sequence, int] = {}

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        index = NgramIndex(self.min_ngram, self.max_ngram, self.prefer)
        index.extend(separated(sequence.references))
        if self.own_text or not sequence.references:
            index.extend(sequence.tokens)
        self._indices[sequence] = index
        if self.align:
            self._alignments[sequence] = Alignment(
                sequence.references or (sequence.tokens[: sequence.prompt_length],), started=False
            )
        self._fed[sequence] = len(sequence.tokens)

    def match(self, sequence: Sequence) -> Match | None:
        index, tokens = self._indices[sequence], sequence.tokens
        fresh = tokens[self._fed[sequence] :]
        self._fed[sequence] = len(tokens)
        if self.own_text:
            index.extend(fresh)
        if self.align:
            place = self._alignments[sequence]
            place.advance(fresh)
            if place.cursor is not None:
                return Match(place.text, place.cursor, place.matched, periodic=False, origin="aligned")
        found = index.find(tokens[-self.max_ngram :])
        return None if found is None else Match(index.text, *found, periodic=self.own_text)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        if self.align:
            super().rewind(sequence, kept)
        elif self._fed[sequence] > kept:
            self._fed[sequence] = kept
            if self.own_text:  # what was taken back stays, as a text that came near to being said
                again = sequence.tokens[max(0, kept - self.max_ngram) : kept]
                self._indices[sequence].extend([-1, *again])

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._indices.pop(sequence, None)
        self._alignments.pop(sequence, None)
        self._fed.pop(sequence, None)


class LookupSettings(BaseModel):
    """Settings of ``pld`` and ``llma``."""

    model_config = ConfigDict(extra="forbid")

    length: Length = None
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
    when_to_use="Where the answer repeats its prompt or itself: summaries, retrieval, edits. Little in free prose.",
    aliases=("prompt-lookup", "ngram"),
)
def build_pld(context: Context, settings: LookupSettings) -> Parts:
    """N-gram lookup in all text so far."""
    drafter = PromptLookup(settings.min_ngram, settings.max_ngram, settings.prefer)
    return Parts(drafter, length_controller(context.target, settings.length))

"""SAM decoding: draft the continuation of the longest suffix of the text that occurred before.

SAM-Decoding (Hu et al. 2024, arXiv 2411.10666). A suffix automaton of references, prompt and output grows by one token
at a time in amortised constant time (Blumer et al. 1985). The longest suffix that occurred before needs no search: it
is the suffix link of the state of the whole text. The longer the match, the more is drafted. Where a datastore is
given, a second, static automaton of its corpus is walked beside (``static_automaton.py``); the longer match is copied,
the text's own unless the corpus has one that is longer by more than ``bias``.

In CPython a token costs 2 to 5 microseconds and about 450 bytes (at most 2 states and 3 transitions). Copying from the
latest occurrence accepts more than from the earliest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from outpace.drafting.copying import LONGEST, CopyDrafter, Length, Match, length_controller, separated
from outpace.drafting.ngram_index import Prefer
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from outpace.drafting.static_automaton import Cursor, StaticAutomaton
from outpace.drafting.suffix_automaton import SuffixAutomaton

BIAS = 5
"""The paper's: a match in the corpus must be so much longer than the text's own to be preferred."""
FROM_CORPUS = 64
"""Most tokens that are copied from the corpus in a round."""


class SuffixLookup(CopyDrafter):
    """Drafts ``base + slope * match`` tokens after a match of at least ``min_match``.

    ``static``: the automaton of a corpus, whose matches count from ``bias`` tokens more than the text's own on.
    """

    def __init__(
        self,
        min_match: int = 1,
        base: int = 3,
        slope: float = 1.0,
        prefer: Prefer = "latest",
        static: StaticAutomaton | None = None,
        bias: int = BIAS,
    ) -> None:
        super().__init__()
        self.min_match, self.base, self.slope, self.prefer = min_match, base, slope, prefer
        self.static, self.bias = static, bias
        self._automata: dict[Sequence, SuffixAutomaton] = {}
        self._cursors: dict[Sequence, Cursor] = {}
        self._fed: dict[Sequence, int] = {}

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        automaton = self._automata[sequence] = SuffixAutomaton(self.prefer)
        automaton.extend(separated(sequence.references))
        automaton.extend(sequence.tokens)
        if self.static is not None:
            cursor = self._cursors[sequence] = self.static.cursor()
            cursor.advance(sequence.tokens)
        self._fed[sequence] = len(sequence.tokens)

    def match(self, sequence: Sequence) -> Match | None:
        automaton, cursor = self._automata[sequence], self._cursors.get(sequence)
        fresh = sequence.tokens[self._fed[sequence] :]
        automaton.extend(fresh)
        self._fed[sequence] = len(sequence.tokens)
        if cursor is not None and self.static is not None:
            cursor.advance(fresh)
            state, length = cursor.match()
            if length >= self.min_match and length > automaton.match_length + self.bias:
                copied = self.static.continuation(state, FROM_CORPUS)
                return Match(copied, 0, length, periodic=False, origin="corpus")
        if automaton.match_length < max(1, self.min_match):
            return None
        return Match(automaton.text, automaton.match_end + 1, automaton.match_length)

    def length(self, match: Match) -> int:
        return int(self.base + self.slope * match.length)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        if self.static is not None:
            super().rewind(sequence, kept)
        elif self._fed[sequence] > kept:  # what was taken back stays, as a text that came near to being said
            automaton = self._automata[sequence]
            self._fed[sequence] = kept
            again = sequence.tokens[max(0, kept - LONGEST) : kept]
            automaton.extend([-len(automaton.text) - 1_000_000, *again])

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._automata.pop(sequence, None)
        self._cursors.pop(sequence, None)
        self._fed.pop(sequence, None)


class SamSettings(BaseModel):
    """Settings of ``sam``."""

    model_config = ConfigDict(extra="forbid")

    length: Length = None
    min_match: int = Field(1, ge=1, le=64, description="draft nothing after a shorter match")
    base: int = Field(2, ge=0, le=512, description="draft tokens whatever the match")
    slope: float = Field(1.0, ge=0.0, le=64.0, description="draft tokens more for every token matched")
    prefer: Prefer = Field("latest", description="which occurrence of the longest match to copy from")
    corpus: int = Field(200_000, ge=0, description="most tokens of a datastore that are held as an automaton; 0: none")
    bias: int = Field(BIAS, ge=0, description="a match in the datastore must be longer by more than this")


@register(
    "sam",
    family="model-free",
    paper="Hu et al. 2024, arXiv 2411.10666",
    summary="Copies after the longest match (suffix automaton) in the text so far, or in a datastore.",
    when_to_use="Where the answer repeats its prompt, itself or a small corpus; longer repetitions pay more. "
    "Little in free prose.",
    aliases=("sam-decoding", "suffix-automaton"),
)
def build_sam(context: Context, settings: SamSettings) -> Parts:
    """Longest-match lookup in all text so far, and in the datastore where one is given."""
    static = None
    if context.has_datastore and settings.corpus:
        from outpace.drafting.static_automaton import shared_automaton

        static = shared_automaton(context.datastore(), settings.corpus)
    drafter = SuffixLookup(settings.min_match, settings.base, settings.slope, settings.prefer, static, settings.bias)
    return Parts(drafter, length_controller(context.target, settings.length))

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

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from outpace.drafters.copying import LONGEST, CopyDrafter, Length, Match, length_controller, separated
from outpace.drafters.prompt_lookup import Prefer
from outpace.method import Context, Parts, register
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from outpace.drafters.static_automaton import Cursor, StaticAutomaton

ROOT_STATE = 0
REFRESH = 16
"""Suffix links along which the latest occurrence is refreshed: all of them, but in long loops."""
BIAS = 5
"""The paper's: a match in the corpus must be so much longer than the text's own to be preferred."""
FROM_CORPUS = 64
"""Most tokens that are copied from the corpus in a round."""


class SuffixAutomaton:
    """The smallest automaton of all substrings of a growing text.

    A state stands for the substrings that end at the same positions: its longest has ``length[state]`` tokens, the
    shorter ones down to ``length[link[state]] + 1`` are its suffixes. ``end[state]`` is one of those positions.
    """

    def __init__(self, prefer: Prefer = "latest") -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.end: list[int] = [-1]
        self.match_length = 0
        """Length of the longest suffix of the text that occurred before (it may overlap itself)."""
        self.match_end = -1
        """Position of the last token of that occurrence."""
        self._last = ROOT_STATE
        self._refresh = REFRESH if prefer == "latest" else 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        text, following, link, length, end = self.text, self.next, self.link, self.length, self.end
        last = self._last
        for token in tokens:
            position = len(text)
            text.append(token)
            new = len(length)
            length.append(position + 1)
            following.append({})
            end.append(position)
            state = last
            while state >= 0 and token not in following[state]:
                following[state][token] = new
                state = link[state]
            suffix = ROOT_STATE if state < 0 else following[state][token]
            if state >= 0 and length[suffix] != length[state] + 1:
                suffix = self._split(suffix, state, token, after=new)
            if len(link) == new:
                link.append(suffix)
            last = new
            self.match_length, self.match_end = length[suffix], end[suffix]
            # Only longest matches are ever asked for, and those lie at the top of this chain. Stopping early leaves
            # an older occurrence in place, which is as true.
            for _ in range(self._refresh):
                if suffix <= ROOT_STATE:
                    break
                end[suffix] = position
                suffix = link[suffix]
        self._last = last

    def _split(self, old: int, state: int, token: int, after: int) -> int:
        """Give the suffixes of ``old`` that ``state`` leads to by ``token`` a state of their own; return it."""
        clone = after + 1
        self.link.append(clone)
        self.link.append(self.link[old])
        self.link[old] = clone
        self.length.append(self.length[state] + 1)
        self.next.append(self.next[old].copy())
        self.end.append(self.end[old])
        while state >= 0 and self.next[state].get(token) == old:
            self.next[state][token] = clone
            state = self.link[state]
        return clone


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
    pays="Where the answer repeats its prompt, itself or a small corpus; longer repetitions pay more. "
    "Little in free prose.",
    aliases=("sam-decoding", "suffix-automaton"),
)
def build_sam(context: Context, settings: SamSettings) -> Parts:
    """Longest-match lookup in all text so far, and in the datastore where one is given."""
    static = None
    if context.has_datastore and settings.corpus:
        from outpace.drafters.static_automaton import shared_automaton

        static = shared_automaton(context.datastore(), settings.corpus)
    drafter = SuffixLookup(settings.min_match, settings.base, settings.slope, settings.prefer, static, settings.bias)
    return Parts(drafter, length_controller(context.target, settings.length))

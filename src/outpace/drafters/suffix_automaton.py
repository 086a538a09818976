"""SAM decoding: draft the continuation of the longest suffix of the text that occurred before.

SAM-Decoding (Hu et al. 2024, arXiv 2411.10666). A suffix automaton of references, prompt and output grows by one token
at a time in amortised constant time (Blumer et al. 1985). The longest suffix that occurred before needs no search: it
is the suffix link of the state of the whole text. The longer the match, the more is drafted.

In CPython a token costs 2 to 5 microseconds and about 450 bytes (at most 2 states and 3 transitions). Copying from the
latest occurrence accepts more than from the earliest.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

from outpace.drafters.copying import CopyDrafter, Length, Match, length_controller, separated
from outpace.drafters.prompt_lookup import Prefer
from outpace.method import Context, Parts, register
from outpace.targets.base import Sequence

ROOT_STATE = 0
REFRESH = 16
"""Suffix links along which the latest occurrence is refreshed: all of them, but in long loops."""


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
    """Drafts ``base + slope * match`` tokens after a match of at least ``min_match``."""

    def __init__(self, min_match: int = 1, base: int = 3, slope: float = 1.0, prefer: Prefer = "latest") -> None:
        super().__init__()
        self.min_match, self.base, self.slope, self.prefer = min_match, base, slope, prefer
        self._automata: dict[Sequence, SuffixAutomaton] = {}
        self._fed: dict[Sequence, int] = {}

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        automaton = self._automata[sequence] = SuffixAutomaton(self.prefer)
        automaton.extend(separated(sequence.references))
        automaton.extend(sequence.tokens)
        self._fed[sequence] = len(sequence.tokens)

    def match(self, sequence: Sequence) -> Match | None:
        automaton = self._automata[sequence]
        automaton.extend(sequence.tokens[self._fed[sequence] :])
        self._fed[sequence] = len(sequence.tokens)
        if automaton.match_length < max(1, self.min_match):
            return None
        return Match(automaton.text, automaton.match_end + 1, automaton.match_length)

    def length(self, match: Match) -> int:
        return int(self.base + self.slope * match.length)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._automata.pop(sequence, None)
        self._fed.pop(sequence, None)


class SamSettings(BaseModel):
    """Settings of ``sam``."""

    model_config = ConfigDict(extra="forbid")

    length: Length = None
    min_match: int = Field(1, ge=1, le=64, description="draft nothing after a shorter match")
    base: int = Field(2, ge=0, le=512, description="draft tokens whatever the match")
    slope: float = Field(1.0, ge=0.0, le=64.0, description="draft tokens more for every token matched")
    prefer: Prefer = Field("latest", description="which occurrence of the longest match to copy from")


@register(
    "sam",
    family="model-free",
    paper="Hu et al. 2024, arXiv 2411.10666",
    summary="Copies after the longest match (suffix automaton); drafts more after longer matches.",
    pays="Where the answer repeats its prompt or itself; longer repetitions pay more. Little in free prose.",
    aliases=("sam-decoding", "suffix-automaton"),
)
def build_sam(context: Context, settings: SamSettings) -> Parts:
    """Longest-match lookup in all text so far."""
    drafter = SuffixLookup(settings.min_match, settings.base, settings.slope, settings.prefer)
    return Parts(drafter, length_controller(context.target, settings.length))

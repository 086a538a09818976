"""The suffix automaton of a growing text (Blumer et al. 1985), built online in amortised constant time a token."""

from __future__ import annotations

from collections.abc import Iterable

from outpace.drafting.ngram_index import Prefer

ROOT_STATE = 0
REFRESH = 16
"""Most suffix links along which the latest occurrence is refreshed; only in long loops there are more."""


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

    @property
    def rivals(self) -> int:
        """How many tokens have followed the match beside the one that follows its last occurrence."""
        return max(0, len(self.next[self.link[self._last]]) - 1) if self.match_length else 0

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
            # Only longest matches are ever looked up, and those lie at the top of this chain. Stopping early leaves
            # an older occurrence in place, which is an occurrence as well.
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

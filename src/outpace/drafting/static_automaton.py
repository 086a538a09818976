"""The static half of SAM decoding: one suffix automaton of a whole corpus, read by every request.

SAM-Decoding (Hu et al. 2024, arXiv 2411.10666) follows the text in an automaton of the corpus as well as in one of the
text itself. It is built once and never changed; a request holds a :class:`Cursor`, which moves in amortised constant
time a token, and which always stands at the longest suffix of the text that occurs in the corpus. What is copied
follows the majority of all occurrences, token by token.

A token of the corpus takes 5 microseconds to build and about 600 bytes: the automaton is for small corpora, and
``rest`` reads large ones from disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from outpace.core.errors import BadInput
from outpace.drafting.copying import separated
from outpace.drafting.suffix_automaton import ROOT_STATE, SuffixAutomaton

if TYPE_CHECKING:
    from outpace.datastore.store import Datastore


class StaticAutomaton:
    """All substrings of some documents, with how often each occurs. Read-only once it is built."""

    def __init__(self, documents: Iterable[Seq[int]]) -> None:
        automaton = SuffixAutomaton(prefer="earliest")
        automaton.extend(separated(documents))
        self.next, self.link, self.length = automaton.next, automaton.link, automaton.length
        self.count = self._occurrences(automaton.text)
        """How often the substrings of a state occur."""
        self._likeliest: dict[int, tuple[int, int] | None] = {}

    def cursor(self) -> Cursor:
        """A cursor before any text."""
        return Cursor(self)

    def _occurrences(self, text: Seq[int]) -> list[int]:
        count = [0] * len(self.length)
        state = ROOT_STATE
        for token in text:  # a prefix ends at one place; what is a suffix of it ends there too
            state = self.next[state][token]
            count[state] = 1
        for state in sorted(range(1, len(count)), key=self.length.__getitem__, reverse=True):
            count[self.link[state]] += count[state]
        return count

    def step(self, state: int) -> tuple[int, int] | None:
        """The token that most often follows a state's substrings, and the state after it; None at ends of documents.

        Of equals the one that came first in the corpus.
        """
        if state not in self._likeliest:
            inside = [pair for pair in self.next[state].items() if pair[0] >= 0]
            self._likeliest[state] = max(inside, key=lambda pair: self.count[pair[1]], default=None)
        return self._likeliest[state]

    def continuation(self, state: int, count: int) -> list[int]:
        """Up to ``count`` tokens, each the one that most often follows the match and what was copied after it."""
        copied: list[int] = []
        while len(copied) < count and (found := self.step(state)) is not None:
            token, state = found
            copied.append(token)
        return copied


class Cursor:
    """Where one request's text stands in a static automaton."""

    def __init__(self, automaton: StaticAutomaton) -> None:
        self.automaton = automaton
        self.state = ROOT_STATE
        self.length = 0
        """Tokens of the longest suffix of the text that occurs in the corpus."""

    def advance(self, tokens: Iterable[int]) -> None:
        """Take in the tokens that the text goes on with."""
        following, link, lengths = self.automaton.next, self.automaton.link, self.automaton.length
        state, length = self.state, self.length
        for token in tokens:
            while state != ROOT_STATE and token not in following[state]:
                state = link[state]
                length = lengths[state]
            if token in following[state]:
                state = following[state][token]
                length += 1
        self.state, self.length = state, length

    def match(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that some document continues; length 0 without one."""
        state, length = self.state, self.length
        while state != ROOT_STATE and self.automaton.step(state) is None:
            state = self.automaton.link[state]
            length = self.automaton.length[state]
        return state, length


_SHARED: WeakKeyDictionary[Datastore, StaticAutomaton] = WeakKeyDictionary()


def shared_automaton(datastore: Datastore, most: int) -> StaticAutomaton:
    """The automaton of a datastore's corpus, built when it is first asked for.

    Raises BadInput for a corpus of more than ``most`` tokens.
    """
    if datastore.tokens > most:
        raise BadInput(
            f"{datastore.place} has {datastore.tokens:,} tokens, and sam builds an automaton of {most:,} at most; set "
            "corpus=N higher (600 bytes of memory each), corpus=0 to do without, or use method rest, which needs none"
        )
    if datastore not in _SHARED:
        _SHARED[datastore] = StaticAutomaton(datastore.documents())
    return _SHARED[datastore]

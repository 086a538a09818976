"""Finite languages over the tokens of toy targets: choices, tries, bounded Dyck words, bounded JSON.

Their states are values that compare by what they allow, as dynamic programming needs. In all of them some tokens that
are allowed lead where the model is unlikely to go on validly: there masking alone is far from the conditional
distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

from outpace.core.constraint import Bits, bits_of

Word = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrieState:
    """``rest``: what words that begin so go on with, sorted."""

    rest: tuple[Word, ...]

    @property
    def complete(self) -> bool:
        return () in self.rest

    def allowed(self, size: int) -> Bits:
        return bits_of(sorted({word[0] for word in self.rest if word}), size)

    def advance(self, token: int) -> TrieState | None:
        rest = tuple(word[1:] for word in self.rest if word and word[0] == token)
        return TrieState(rest) if rest else None

    def forced(self) -> tuple[int, ...]:
        return self.rest[0] if len(self.rest) == 1 else ()


@dataclass(frozen=True)
class Words:
    """The given words; those with common beginnings make a trie."""

    words: tuple[Word, ...]

    def begin(self) -> TrieState:
        return TrieState(tuple(sorted(self.words)))

    def accepts(self, text: str) -> bool:
        return True


SHORT = Words(((0, 1, 0), (0, 1, 2), (1, 0, 0), (1, 2, 0), (1, 2, 1), (2, 0, 1)))
"""Words over three tokens, of which some beginnings leave one way and others several: for certification."""


@dataclass(frozen=True, slots=True)
class RuleState:
    """A state by its ``name`` in a table, and how many tokens may still come (None: any number)."""

    name: str
    left: int
    table: _Table

    @property
    def complete(self) -> bool:
        return self.name in self.table.final

    def allowed(self, size: int) -> Bits:
        return bits_of([token for token in range(size) if self.advance(token) is not None], size)

    def advance(self, token: int) -> RuleState | None:
        to = self.table.moves.get(self.name, {}).get(token)
        if to is None or self.left < 1 + self.table.needed[to]:
            return None
        return RuleState(to, self.left - 1, self.table)

    def forced(self) -> tuple[int, ...]:
        return ()


class _Table:
    """Moves by state and token, and the states where a word may end; compared by identity."""

    def __init__(self, moves: Mapping[str, Mapping[int, str]], final: Seq[str]) -> None:
        self.moves, self.final = moves, frozenset(final)
        self.needed: dict[str, int] = dict.fromkeys(final, 0)
        """Tokens from each state to the nearest end."""
        for _ in moves:
            for name, after in moves.items():
                known = [1 + self.needed[to] for to in after.values() if to in self.needed]
                if known and self.needed.get(name, 1 << 30) > min(known):
                    self.needed[name] = min(known)


@dataclass(frozen=True, eq=False)
class Bounded:
    """The words of an automaton that have ``longest`` tokens at most."""

    moves: Mapping[str, Mapping[int, str]]
    final: tuple[str, ...]
    longest: int
    first: str = "0"

    @cached_property
    def table(self) -> _Table:
        return _Table(self.moves, self.final)

    def begin(self) -> RuleState:
        return RuleState(self.first, self.longest, self.table)

    def accepts(self, text: str) -> bool:
        return True


def dyck(depth: int, longest: int, opening: int = 0, closing: int = 1) -> Bounded:
    """Balanced brackets, at most ``depth`` open at once and ``longest`` tokens; not empty."""
    moves = {str(at): dict(_brackets(at, depth, opening, closing)) for at in range(depth + 1)}
    begin = {"begin": {opening: "1"}}
    return Bounded({**moves, **begin}, ("0",), longest, "begin")


def _brackets(at: int, depth: int, opening: int, closing: int) -> Iterator[tuple[int, str]]:
    if at < depth:
        yield opening, str(at + 1)
    if at > 0:
        yield closing, str(at - 1)


def json_object(pairs: int, longest: int) -> Bounded:
    """An object of ``pairs`` at most, ``{ key : value , key : value }``, a value being a digit, a nested object of one
    pair, or digits up to the length: tokens 0 ``{``, 1 ``}``, 2 ``key:``, 3 ``,``, 4 a digit."""
    moves: dict[str, dict[int, str]] = {"0": {0: "k0"}, "end": {}}
    for at in range(pairs):
        close = "end"
        more = {3: f"n{at}"} if at + 1 < pairs else {}
        moves[f"k{at}"] = {2: f"v{at}"} | ({1: close} if at == 0 else {})
        moves[f"v{at}"] = {4: f"d{at}", 0: f"o{at}"}
        moves[f"d{at}"] = {4: f"d{at}", 1: close, **more}
        moves[f"o{at}"] = {2: f"w{at}", 1: f"x{at}"}
        moves[f"w{at}"] = {4: f"e{at}"}
        moves[f"e{at}"] = {4: f"e{at}", 1: f"x{at}"}
        moves[f"x{at}"] = {1: close, **more}
        if more:
            moves[f"n{at}"] = {2: f"v{at + 1}"}
    return Bounded(moves, ("end",), longest)

"""Constraint states over the grammar engine's parser: values for the sampler, one moving parser behind them.

Copying a parser copies its tables, which takes longer than a forward pass of a small model. So all states of a request
share one parser, and a state is a place: the tokens that lead to it, linked to its parent's. Asking a state moves the
parser there, back to the common ancestor and forth. The nodes of a tree are asked from the root down, so that a move is
mostly one token; what was found is kept with the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from outpace.core.constraint import WORD, count, holds, tokens_of, words
from outpace.core.errors import BadInput, shortened

if TYPE_CHECKING:
    from outpace.constraints.token_trie import TokenTrie
    from outpace.core.constraint import Bits

_FEW = 64
"""Allowed tokens among which :meth:`ParserState.longest` looks."""


class Place:
    """A token after another place; ``depth``: tokens from the answer's beginning. All places of an answer stay."""

    __slots__ = ("before", "depth", "token")

    def __init__(self, before: Place | None, token: int) -> None:
        self.before, self.token = before, token
        self.depth: int = 0 if before is None else before.depth + 1


class Cursor:
    """One parser, made by ``make``, and the place where it stands. Hands it to ``release`` when no state uses it."""

    def __init__(self, make: Callable[[], Any], trie: TokenTrie, release: Callable[[Any], None]) -> None:
        self._make, self.trie, self._release = make, trie, release
        self.matcher = make()
        self.root = self.at = Place(None, -1)

    def __del__(self) -> None:
        self._release(self.matcher)

    def move(self, to: Place) -> None:
        """Move the parser. Raises BadInput where it fails."""
        here, there, ahead = self.at, to, list[int]()
        while here is not there:
            if here.depth >= there.depth:
                assert here.before is not None
                here = here.before
            else:
                assert there.before is not None
                ahead.append(there.token)
                there = there.before
        if back := self.at.depth - here.depth:
            self.matcher.rollback(back)
        if ahead:
            self.matcher.consume_tokens(ahead[::-1])
        self.at = to
        self.check_failure()

    def step(self, token: int) -> bool:
        """Consume a token, if the grammar allows it."""
        taken = self.matcher.try_consume_tokens([token]) == 1
        return not self.check_failure() and taken

    def check_failure(self) -> bool:
        """Whether the parser has found that nothing can follow. Raises BadInput where it has reached a limit.

        A parser that has failed stays so: another one takes its place."""
        if not self.matcher.is_error():
            return False
        why = self.matcher.get_error()
        self.matcher, self.at = self._make(), self.root
        if "NoExtensionBias" in why:
            return True
        raise BadInput(f"the grammar is too complex to go on: {shortened(why.replace('<non-verbose/>', ''))}")


class ParserState:
    """A :class:`~outpace.core.constraint.ConstraintState` of the engine."""

    __slots__ = ("__weakref__", "_bits", "_children", "_complete", "_cursor", "_forced", "_longest", "place")

    def __init__(self, cursor: Cursor, place: Place) -> None:
        self._cursor, self.place = cursor, place
        self._bits: Bits | None = None
        self._complete: bool | None = None
        self._forced: tuple[int, ...] | None = None
        self._longest: tuple[int, ...] | None = None
        self._children: WeakValueDictionary[int, ParserState] = WeakValueDictionary()

    @property
    def complete(self) -> bool:
        if self._complete is None:
            self._cursor.move(self.place)
            self._complete = bool(self._cursor.matcher.is_accepting())
        return self._complete

    def allowed(self, size: int) -> Bits:
        if self._bits is None or len(self._bits) != words(size):
            self._bits = self._computed(size)
        return self._bits

    def _computed(self, size: int) -> Bits:
        import numpy as np

        cursor = self._cursor
        cursor.move(self.place)
        known = cursor.trie.size
        found = np.zeros(max(words(size), words(known + 1)), np.uint32)
        if not cursor.matcher.is_stopped():
            given = np.frombuffer(cursor.matcher.compute_bitmask(), np.uint8)
            if cursor.check_failure():
                return found[: words(size)]
            found.view(np.uint8)[: len(given)] = given
            found[known // WORD] &= np.uint32(~(1 << known % WORD) & 0xFFFFFFFF)  # the engine's own token for the end
        return found[: words(size)]

    def advance(self, token: int) -> ParserState | None:
        child = self._children.get(token)
        if child is not None:
            return child
        if not 0 <= token < self._cursor.trie.size or (self._bits is not None and not holds(self._bits, token)):
            return None
        cursor = self._cursor
        cursor.move(self.place)
        if not cursor.step(token):
            return None
        cursor.at = Place(self.place, token)
        child = ParserState(cursor, cursor.at)
        self._children[token] = child
        return child

    def forced(self) -> Sequence[int]:
        if self._forced is None:
            cursor = self._cursor
            cursor.move(self.place)
            text = cursor.matcher.compute_ff_bytes()
            self._forced = () if cursor.check_failure() or not text else tuple(cursor.trie.spelled(text))
        return self._forced

    def longest(self, size: int) -> Sequence[int]:
        if self._longest is None:
            allowed = self.allowed(size)
            tokens = tokens_of(allowed, size).tolist() if count(allowed) <= _FEW else []
            text = {token: self._cursor.trie.tokenizer.token_bytes(token) or b"" for token in tokens}
            begins = {one[:end] for one in text.values() for end in range(1, len(one))}
            found = [token for token in tokens if text[token] not in begins]
            self._longest = tuple(sorted(found, key=lambda token: -len(text[token])))
        return self._longest

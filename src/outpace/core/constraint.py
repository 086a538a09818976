"""Constraint: which tokens a grammar allows after each beginning of an answer, for the sampler.

A constraint is part of the target: at every node of a tree the distribution is the one that the grammar allows for the
path to that node. States are values, so that a tree forks them at every node. The grammars themselves, and the engine
behind them, are in :mod:`outpace.constraints`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from outpace.core.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

WORD = 32
Bits: TypeAlias = "npt.NDArray[np.uint32]"
"""A set of tokens: bit i % 32 of word i // 32 is set for token i; (ceil(V / 32),)."""


class ConstraintState(Protocol):
    """What a grammar knows of the answer so far. A value: ``advance`` returns another one."""

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        ...

    def allowed(self, size: int) -> Bits:
        """The tokens that may follow, of a vocabulary of ``size``; tokens that end an answer need not be among them.

        The array must not be changed. Raises BadInput where the grammar's engine reaches one of its limits.
        """
        ...

    def advance(self, token: int) -> ConstraintState | None:
        """The state after one more token; None where the grammar does not allow it. Raises BadInput as above."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that spell what every answer goes on with; empty where answers differ, or where that is not known.

        The same text may have other spellings, which are allowed as well."""
        ...


@runtime_checkable
class KnowsSpelling(Protocol):
    """A state that knows the text of its tokens."""

    def longest(self, size: int) -> Sequence[int]:
        """Of few allowed tokens, those that no other one of them goes on from, the longest first: how a tokenizer would
        begin the keys, values or punctuation that may follow. Empty where many tokens are allowed."""
        ...


class Constraint(Protocol):
    """A grammar over one vocabulary."""

    def begin(self) -> ConstraintState:
        """The state of an empty answer."""
        ...

    def accepts(self, text: str) -> bool:
        """Whether ``text`` is a whole answer under the grammar."""
        ...


@runtime_checkable
class ShowsText(Protocol):
    """A constraint of whose answers not all tokens are text for the reader."""

    def shown(self) -> Callable[[int], bool]:
        """For one answer: told each of its tokens in turn, whether it is text to be shown."""
        ...


class AnswerComplete(BadInput):
    """Not a mistake: the grammar's answer is whole, and no token that ends an answer is known. The answer ends."""


class DeadEnd(BadInput):
    """No token of the vocabulary goes on as the grammar demands."""


FORBIDDEN = BadInput("a token was accepted that the grammar does not allow; use a lossless acceptance rule")
"""Why nothing follows a draft token that the grammar does not allow; no lossless rule accepts one."""

GrammarState: TypeAlias = ConstraintState | BadInput | None
"""None without a grammar, and behind a token that ends the answer; BadInput: why no token can follow."""


def words(size: int) -> int:
    """How many words of :data:`Bits` a vocabulary of ``size`` tokens takes."""
    return -(-size // WORD)


def bits_of(tokens: Sequence[int], size: int) -> Bits:
    """The set of ``tokens`` of a vocabulary of ``size``."""
    import numpy as np

    bits = np.zeros(words(size), np.uint32)
    for token in tokens:
        bits[token // WORD] |= np.uint32(1 << token % WORD)
    return bits


def holds(bits: Bits, token: int) -> bool:
    """Whether ``token`` is in the set."""
    return bool(int(bits[token // WORD]) >> token % WORD & 1)


def count(bits: Bits) -> int:
    """How many tokens are in the set."""
    import numpy as np

    return int(np.unpackbits(bits.view(np.uint8)).sum()) if bits.any() else 0


def single(bits: Bits) -> int | None:
    """The only token of the set; None where it holds more, or none."""
    import numpy as np

    held = np.flatnonzero(bits)
    if len(held) != 1 or (word := int(bits[held[0]])) & (word - 1):
        return None
    return int(held[0]) * WORD + word.bit_length() - 1


def tokens_of(bits: Bits, size: int) -> npt.NDArray[np.intp]:
    """The tokens of the set, ascending."""
    import numpy as np

    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:size])


def mask(row: Tensor, bits: Bits) -> Tensor:
    """Set the logits (V,) of all tokens that are not in the set to -inf, in place; returns the row."""
    import numpy as np
    import torch

    banned = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(row)] == 0
    return row.masked_fill_(torch.from_numpy(banned).to(row.device), -torch.inf)


class Masks:
    """A request's constraint as the sampler asks it. Nothing that a constraint raises for bad input gets out.

    ``stop_ids`` may follow exactly where the grammar is complete, also where it would allow one as text.
    """

    __slots__ = ("_constraint", "_size", "_stops", "stop_ids")

    def __init__(self, constraint: Constraint, stop_ids: frozenset[int], size: int) -> None:
        self._constraint, self._size = constraint, size
        self.stop_ids = stop_ids
        self._stops = bits_of([token for token in stop_ids if 0 <= token < size], size)

    def begin(self) -> GrammarState:
        """The state of an empty answer."""
        try:
            return self._constraint.begin()
        except BadInput as failure:
            return failure

    def advance(self, state: GrammarState, token: int) -> GrammarState:
        """The state after one more token that does not end the answer."""
        if state is None or isinstance(state, BadInput):
            return state
        try:
            after = state.advance(token)
        except BadInput as failure:
            return failure
        return FORBIDDEN if after is None else after

    def allowed(self, state: GrammarState) -> Bits | BadInput | None:
        """The tokens that may follow, those that end an answer included; None: all; or why there is none."""
        if state is None or isinstance(state, BadInput):
            return state
        try:
            bits, complete = state.allowed(self._size), state.complete
        except BadInput as failure:
            return failure
        bits = bits | self._stops if complete else bits & ~self._stops
        if bits.any():
            return bits
        if complete:
            return AnswerComplete("the answer is complete under its grammar")
        return DeadEnd(
            "no token can follow: none of the vocabulary's tokens goes on as the grammar demands; change the grammar"
        )

    def complete(self, state: GrammarState) -> bool:
        """Whether the answer may end at a state; not where the grammar's engine fails."""
        if state is None or isinstance(state, BadInput):
            return False
        try:
            return state.complete
        except BadInput:
            return False

    def forced(self, state: GrammarState) -> Sequence[int]:
        """Tokens that spell what every answer goes on with; empty where answers may end or differ, and where the
        grammar's engine fails: a request ends with that only when it has to know what may follow."""
        if state is None or isinstance(state, BadInput):
            return ()
        try:
            return () if state.complete else state.forced()
        except BadInput:
            return ()

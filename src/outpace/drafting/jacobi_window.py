"""A window of guesses that is iterated on, round after round: what the Jacobi methods share.

The guesses are a draft chain. After a round, the target's distribution after every guess that was not reached is what
the next guess for the following position is made from: its argmax (Jacobi), or a draw (speculative Jacobi). New
positions enter with a first guess. Where first guesses have lately come right more often than iterated ones, the whole
window starts afresh from one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import mul
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.calibration import Calibration
from outpace.drafting.copying import continuation
from outpace.drafting.ngram_index import NgramIndex
from outpace.targets.base import Sequence, TreeScores

if TYPE_CHECKING:
    from torch import Tensor

Guess = Literal["lookup", "last", "pad"]
OLDEST = 3
"""The oldest age of a guess that is told apart."""
NGRAM = 3
"""Longest match that a first guess is copied from."""


def prior(kind: int) -> float:
    """Acceptance before anything was observed: of iterated guesses by age (0 and up), of first guesses by the length
    of the match behind them (-1 - length)."""
    return (0.04, 0.08, 0.12, 0.2, 0.4, 0.25, 0.08, 0.04)[kind]


@dataclass(slots=True)
class Slot:
    """A guess for one position. ``token`` was drawn from ``q`` (None: it is deterministic; no token: not drawn yet).

    ``p``: the newer distribution, (V,), that it is to be drawn from again.
    """

    token: int | None
    kind: int
    q: QRow | None = None
    p: Tensor | None = None


@dataclass(slots=True)
class WindowState(DraftState):
    """Guesses for the positions behind the committed tokens."""

    calibration: Calibration = field(default_factory=lambda: Calibration(prior))
    slots: list[Slot] = field(default_factory=list)
    others: list[Slot] = field(default_factory=list)
    """What might have been drafted in this round instead: it teaches as well."""
    drafted: bool = False
    """Whether this round's tree was asked for."""
    index: NgramIndex = field(default_factory=lambda: NgramIndex(1, NGRAM))
    """The text, where first guesses are looked up."""


class FirstGuesses:
    """Guesses for positions that no forward has scored yet: deterministic, given the tokens before them.

    ``lookup``: what followed the last tokens when they last occurred, the last token again if they never did; ``last``:
    that token again; ``pad``: a padding token.
    """

    def __init__(self, guess: Guess = "lookup", pad: int = 0) -> None:
        self.guess, self.pad = guess, pad

    def fill(self, state: WindowState, chain: Seq[int], count: int) -> tuple[list[int], int]:
        """``count`` tokens to follow the committed ones and ``chain``, and the length of the match behind them."""
        tokens, index = state.sequence.tokens, state.index
        tail = [*tokens[-NGRAM:], *chain][-NGRAM:]
        if self.guess == "pad":
            return [self.pad] * count, 0
        if self.guess == "lookup":
            index.extend(tokens[len(index.text) :])
            if (found := index.find(tail)) is not None:
                return continuation(index.text, found[0], count, periodic=True), found[1]
        return [tail[-1]] * count, 0


def first_guesses(guess: Guess, pad: int, vocab_size: int) -> FirstGuesses:
    """What a method's settings ask for. Raises BadInput when the padding token is not in the vocabulary."""
    if guess == "pad" and pad >= vocab_size:
        raise BadInput(f"the padding token {pad} is not in the vocabulary of {vocab_size} tokens; choose another")
    return FirstGuesses(guess, pad)


GuessSetting = Annotated[
    Guess,
    Field(
        description="a position's first guess: the token that followed the last tokens earlier, the last token, "
        "or padding"
    ),
]
PadSetting = Annotated[int, Field(ge=0, description="the padding token, if padding is the first guess")]
RestartSetting = Annotated[
    bool,
    Field(
        description="restart from the tokens that followed the last tokens earlier, if those guesses are accepted "
        "more often"
    ),
]


class Iterated(Drafter[WindowState], ABC):
    """Drafts a window of guesses and renews them from the target's scores."""

    def __init__(self, first: FirstGuesses, *, restart: bool = True) -> None:
        self._first = first
        self._restart = restart

    @abstractmethod
    def size(self, sequence: Sequence) -> int:
        """How many guesses are iterated now."""

    @abstractmethod
    def renew(self, slot: Slot | None, scores: TreeScores, node: int) -> Slot:
        """The guess for the position after ``node``, which has been scored; ``slot`` is the guess that was there."""

    def settle(self, sequence: Sequence, slots: Seq[Slot]) -> None:
        """Draw what is yet to be drawn."""

    def begin(self, sequence: Sequence) -> WindowState:
        return WindowState(sequence)

    def propose(self, state: WindowState, budget: Budget) -> TokenTree:
        state.drafted = True
        size = min(budget.depth, budget.max_nodes, self.size(state.sequence))
        if size <= 0:
            return TokenTree()
        self._begin_afresh(state, size)
        self.settle(state.sequence, state.slots[:size])
        if len(state.slots) < size:
            chain = [slot.token for slot in state.slots if slot.token is not None]
            tokens, match = self._first.fill(state, chain, size - len(chain))
            # The estimates for a sampled window's beginning must not depend on the draws that follow.
            kind = -1 if chain and self.proposal.sampled else -1 - match
            state.slots += [Slot(token, kind) for token in tokens]
        path_acceptance_probs = list(
            accumulate((state.calibration.rate(slot.kind) for slot in state.slots[:size]), mul)
        )
        count = size if self.proposal.sampled else budget.best_draft_size(path_acceptance_probs)
        tree = TokenTree()
        for slot, path_acceptance_prob in zip(state.slots[:count], path_acceptance_probs, strict=False):
            assert slot.token is not None
            tree.add(len(tree) - 1, slot.token, slot.q, path_acceptance_prob)
        return tree

    def _begin_afresh(self, state: WindowState, size: int) -> None:
        """Replace all guesses by a first guess, where its kind has come right more often than the next guess's.

        The choice depends on kinds and on committed tokens alone: guesses may be draws, and no draw is ever dropped
        for its token.
        """
        if not self._restart or not state.slots:
            return
        tokens, match = self._first.fill(state, (), size)
        fresh = [Slot(token, -1 - match) for token in tokens]
        rate = state.calibration.rate
        if fresh and match and rate(fresh[0].kind) > rate(state.slots[0].kind):
            state.slots, state.others = fresh, state.slots
        else:
            state.others = fresh

    def observe(self, state: WindowState, verdict: Verdict) -> None:
        committed = verdict.committed
        if state.drafted:
            for slots in (state.slots, state.others):
                _learn(state.calibration, slots, committed)
            self._renew(state.slots, verdict.scores, len(committed))
            state.drafted, state.others = False, []
        # Guesses that were not scored, and not reached, stay as they were.
        state.slots = state.slots[len(committed) :]

    def _renew(self, slots: list[Slot], scores: TreeScores, committed: int) -> None:
        drawn = takewhile(lambda slot: slot.token is not None, slots)
        nodes = scores.tree.follow(slot.token for slot in drawn if slot.token is not None)
        for index in range(committed, len(nodes) + 1):
            node = nodes[index - 1]
            if scores.distribution.dead_end(node):
                return
            if index < len(slots):
                slots[index] = self.renew(slots[index], scores, node)
            else:
                slots.append(self.renew(None, scores, node))


def _learn(calibration: Calibration, slots: Seq[Slot], committed: Seq[int]) -> None:
    for slot, token in zip(slots, committed, strict=False):
        if slot.token is None or slot.p is not None:
            return  # was not drawn for this round
        calibration.learn(slot.kind, slot.token == token)
        if slot.token != token:
            return

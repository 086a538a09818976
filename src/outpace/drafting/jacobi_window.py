"""A window of guesses that is iterated on, round after round: what the Jacobi methods share.

The guesses are a draft chain. After a round, the target's word after every guess that was not reached is what the next
guess for the position that follows is made from: its choice (Jacobi), or its distribution (speculative Jacobi). New
positions enter with a first guess. Where first guesses have lately come right more often than iterated ones, the whole
window starts afresh from one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT, QRow, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.calibration import Calibration
from outpace.drafting.copying import continuation
from outpace.drafting.ngram_index import NgramIndex
from outpace.targets.base import Sequence, TreeScores

Guess = Literal["lookup", "last", "pad"]
OLDEST = 3
NGRAM = 3
"""Longest match that a first guess is copied from."""


def prior(kind: int) -> float:
    """Acceptance before anything is known: of iterated guesses by age (0 and up), of first guesses by the length of
    the match behind them (-1 - length)."""
    return (0.04, 0.08, 0.12, 0.2, 0.4, 0.25, 0.08, 0.04)[kind]


class FirstGuesses:
    """Guesses for positions that no forward has looked at yet: certain, given the tokens before them.

    ``lookup``: what followed the last tokens when they last occurred, the last token again if they never did; ``last``:
    that token again; ``pad``: a padding token.
    """

    def __init__(self, guess: Guess = "lookup", pad: int = 0) -> None:
        self.guess, self.pad = guess, pad
        self._indices: dict[Sequence, NgramIndex] = {}

    def fill(self, sequence: Sequence, chain: Seq[int], count: int) -> tuple[list[int], int]:
        """``count`` tokens to follow the committed ones and ``chain``, and the length of the match behind them."""
        tail = [*sequence.tokens[-NGRAM:], *chain][-NGRAM:]
        if self.guess == "pad":
            return [self.pad] * count, 0
        if self.guess == "lookup":
            index = self._indices.setdefault(sequence, NgramIndex(1, NGRAM))
            index.extend(sequence.tokens[len(index.text) :])
            if (found := index.find(tail)) is not None:
                return continuation(index.text, found[0], count, periodic=True), found[1]
        return [tail[-1]] * count, 0

    def end(self, sequence: Sequence) -> None:
        """The request left."""
        self._indices.pop(sequence, None)


def first_guesses(guess: Guess, pad: int, vocab_size: int) -> FirstGuesses:
    """What a method's settings ask for. Raises BadInput when the padding token is not in the vocabulary."""
    if guess == "pad" and pad >= vocab_size:
        raise BadInput(f"the padding token {pad} is not in the vocabulary of {vocab_size} tokens; choose another")
    return FirstGuesses(guess, pad)


GuessSetting = Annotated[
    Guess,
    Field(description="a position's first guess: what followed the last tokens before, the last token, or padding"),
]
PadSetting = Annotated[int, Field(ge=0, description="the padding token, where that is the first guess")]
RestartSetting = Annotated[
    bool, Field(description="start afresh from what followed the last tokens where that comes right more often")
]


@dataclass(slots=True)
class Slot:
    """A guess for one position. ``token`` was drawn from ``q`` (None: it is certain; no token: yet to be drawn).

    ``p``: the newer distribution, (V,), that it is to be drawn from again.
    """

    token: int | None
    kind: int
    q: QRow | None = None
    p: Tensor | None = None


@dataclass(slots=True)
class Window:
    """Guesses for the positions from ``start`` on."""

    start: int
    calibration: Calibration
    slots: list[Slot] = field(default_factory=list)
    others: list[Slot] = field(default_factory=list)
    """What might have been drafted in this round instead: it teaches all the same."""
    drafted: bool = False
    """Whether this round's tree was asked for."""


class Iterated(Drafter, ABC):
    """Drafts a window of guesses and renews them from what the target says."""

    def __init__(self, first: FirstGuesses, *, restart: bool = True) -> None:
        self._first = first
        self._restart = restart
        self._windows: dict[Sequence, Window] = {}

    @abstractmethod
    def size(self, sequence: Sequence) -> int:
        """How many guesses are iterated now."""

    @abstractmethod
    def renew(self, slot: Slot | None, scored: TreeScores, node: int) -> Slot:
        """The guess for the position after ``node``, which has been scored; ``slot`` is the guess that was there."""

    def settle(self, sequence: Sequence, slots: Seq[Slot]) -> None:
        """Draw what is yet to be drawn."""

    def begin(self, sequence: Sequence) -> None:
        self._windows[sequence] = Window(len(sequence.tokens), Calibration(prior))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        return [self._chain(one, budget) for one, budget in zip(sequences, budgets, strict=True)]

    def _chain(self, sequence: Sequence, budget: Budget) -> TokenTree:
        window = self._windows[sequence]
        window.drafted = True
        size = min(budget.depth, budget.nodes, self.size(sequence))
        if size <= 0:
            return TokenTree()
        self._begin_afresh(sequence, window, size)
        self.settle(sequence, window.slots[:size])
        if len(window.slots) < size:
            chain = [slot.token for slot in window.slots if slot.token is not None]
            tokens, match = self._first.fill(sequence, chain, size - len(chain))
            # How a sampled window goes on must not show in how likely its beginning is said to be accepted.
            kind = -1 if chain and self.proposal.sampled else -1 - match
            window.slots += [Slot(token, kind) for token in tokens]
        path_acceptance_prob, path_acceptance_probs = 1.0, []
        for slot in window.slots[:size]:
            path_acceptance_prob *= window.calibration.rate(slot.kind)
            path_acceptance_probs.append(path_acceptance_prob)
        count = size if self.proposal.sampled else budget.best_draft_size(path_acceptance_probs)
        tree, node = TokenTree(), ROOT
        for slot, path_acceptance_prob in zip(window.slots[:count], path_acceptance_probs, strict=False):
            assert slot.token is not None
            node = tree.add(node, slot.token, slot.q, path_acceptance_prob)
        return tree

    def _begin_afresh(self, sequence: Sequence, window: Window, size: int) -> None:
        """Replace all guesses by a first guess, where its kind has come right more often than the next guess's.

        The choice looks at kinds and at committed tokens alone: guesses may be draws, and no draw is ever dropped for
        what it is.
        """
        if not self._restart or not window.slots:
            return
        tokens, match = self._first.fill(sequence, (), size)
        fresh = [Slot(token, -1 - match) for token in tokens]
        rate = window.calibration.rate
        if fresh and match and rate(fresh[0].kind) > rate(window.slots[0].kind):
            window.slots, window.others = fresh, window.slots
        else:
            window.others = fresh

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence, scored in zip(sequences, scores, strict=True):
            window = self._windows[sequence]
            came = sequence.tokens[window.start :]
            if window.drafted:
                for slots in (window.slots, window.others):
                    _learn(window.calibration, slots, came)
                self._renew(window, scored, len(came))
                window.drafted, window.others = False, []
            # Guesses that were not scored, and not reached, are what they were.
            window.slots = window.slots[len(came) :]
            window.start = len(sequence.tokens)

    def _renew(self, window: Window, scored: TreeScores, committed: int) -> None:
        tokens = [slot.token for slot in window.slots]
        nodes = along(scored.tree, tokens)
        for index in range(committed, len(nodes) + 1):
            node = nodes[index - 1]
            if scored.distribution.dead_end(node):
                return
            if index < len(window.slots):
                window.slots[index] = self.renew(window.slots[index], scored, node)
            else:
                window.slots.append(self.renew(None, scored, node))

    def end(self, sequence: Sequence) -> None:
        self._windows.pop(sequence, None)
        self._first.end(sequence)


def _learn(calibration: Calibration, slots: Seq[Slot], came: Seq[int]) -> None:
    for slot, token in zip(slots, came, strict=False):
        if slot.token is None or slot.p is not None:
            return  # was not drawn for this round
        calibration.learn(slot.kind, slot.token == token)
        if slot.token != token:
            return


def along(tree: TokenTree, tokens: Seq[int | None]) -> list[int]:
    """The nodes of ``tree`` that spell ``tokens`` from the root down, as far as there are any."""
    nodes: list[int] = []
    node: int | None = ROOT
    for token in tokens:
        if token is None or node is None or (node := tree.child(node, token)) is None:
            break
        nodes.append(node)
    return nodes

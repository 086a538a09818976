"""What drafters that copy from text share: the text they copy from, and the continuation of a match."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.calibration import Calibration
from outpace.targets.base import Sequence, Target, TreeScores


def separated(texts: Iterable[Seq[int]]) -> list[int]:
    """Texts end to end, each followed by a negative number that occurs once: no match and no copy crosses it."""
    whole: list[int] = []
    for number, text in enumerate(texts, start=1):
        whole.extend(text)
        whole.append(-number)
    return whole


def continuation(text: Seq[int], start: int, count: int, *, periodic: bool) -> list[int]:
    """Up to ``count`` tokens of ``text`` from ``start``, ending before a separator.

    Where the copy reaches the end of a text that the model is writing, ``periodic`` goes on by reading what was just
    copied: the match says that the text repeats itself at that distance, so a loop is drafted to any length.
    """
    copied = list(text[start : start + count])
    for index, token in enumerate(copied):
        if token < 0:
            return copied[:index]
    if periodic and copied:
        period = len(copied)
        copied.extend(copied[index % period] for index in range(count - period))
    return copied


Length = Annotated[
    int | None,
    Field(ge=0, le=512, description="most draft tokens a round; by default what pays by the measured costs"),
]


def length_controller(target: Target, length: int | None) -> Controller:
    """The length that was asked for, or as many draft tokens as pay."""
    return CostModel(target.costs) if length is None else Fixed(length, nodes=length)


INDEX_BYTES_PER_TOKEN = 600
"""Most memory that an index keeps of a token of reference text (a suffix automaton)."""

LONGEST = 16
"""Longer matches are all of one kind."""
CopyKind = tuple[str, int]
"""Where a token is copied from, if that is told apart, and the length of the match behind it."""


class Copied(NamedTuple):
    """What could be copied in a round: the tokens, the kind of each, and the sequence's length then."""

    tokens: list[int]
    kinds: list[CopyKind]
    at: int


@dataclass(slots=True)
class Match:
    """A match of the last ``length`` tokens: ``text[start:]`` is what followed them."""

    text: Seq[int]
    start: int
    length: int
    periodic: bool = True
    """Whether ``text`` ends where the model is writing."""
    origin: str = ""
    """Copies of different origins are right at rates of their own."""


class CopyDrafter(Drafter, ABC):
    """Drafts what followed the last tokens where they occurred before: a deterministic chain.

    How likely a copied token is accepted depends on how long the match behind it is, those copied before it included;
    how much, every request learns for itself.
    """

    def __init__(self) -> None:
        self._calibrations: dict[Sequence, Calibration] = {}
        self._copied: dict[Sequence, Copied] = {}

    @abstractmethod
    def match(self, sequence: Sequence) -> Match | None:
        """The match to copy from, if any, after taking in the tokens that arrived."""

    def length(self, match: Match) -> int:
        """How many tokens are worth copying where no costs are known, the budget aside."""
        return sys.maxsize

    def prior(self, kind: CopyKind) -> float:
        """Acceptance after a match of so many tokens before anything is known (``benchmarks/priors.py``)."""
        return 1.0 - 0.77 / math.pow(kind[1], 0.8)

    def begin(self, sequence: Sequence) -> None:
        self._calibrations[sequence] = Calibration(self.prior)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        return [self._chain(one, budget) for one, budget in zip(sequences, budgets, strict=True)]

    def _chain(self, sequence: Sequence, budget: Budget) -> TokenTree:
        depth = min(budget.depth, budget.nodes)
        if depth <= 0 or (match := self.match(sequence)) is None:
            return TokenTree()
        count = depth if budget.relative_costs else min(depth, self.length(match))
        tokens = continuation(match.text, match.start, count, periodic=match.periodic)
        kinds = [(match.origin, min(match.length + index, LONGEST)) for index in range(len(tokens))]
        self._copied[sequence] = Copied(tokens, kinds, len(sequence.tokens))
        rate, path_acceptance_prob, path_acceptance_probs = self._calibrations[sequence].rate, 1.0, []
        for kind in kinds:
            path_acceptance_prob *= rate(kind)
            path_acceptance_probs.append(path_acceptance_prob)
        tree, node = TokenTree(), ROOT
        for token, path_acceptance_prob in zip(
            tokens[: budget.best_draft_size(path_acceptance_probs)], path_acceptance_probs, strict=False
        ):
            node = tree.add(node, token, path_acceptance_prob=path_acceptance_prob)
        return tree

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence in sequences:
            copied = self._copied.pop(sequence, None)
            if copied is None:
                continue
            learn = self._calibrations[sequence].learn
            # All that could have been copied teaches, drafted or not.
            for kind, token, came in zip(copied.kinds, copied.tokens, sequence.tokens[copied.at :], strict=False):
                learn(kind, token == came)
                if token != came:
                    break

    def end(self, sequence: Sequence) -> None:
        self._calibrations.pop(sequence, None)
        self._copied.pop(sequence, None)

"""What drafters that copy from text share: the text they copy from, and the continuation of a match."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.drafters.base import Drafter
from outpace.targets.base import Sequence, Target
from outpace.tree import TokenTree


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


def chain_controller(target: Target, length: int | None, sampled: int) -> Controller:
    """The length that was asked for, or the one that pays (``sampled`` tokens at temperature above 0)."""
    return CostModel(target.costs, sampled) if length is None else Fixed(length, nodes=length)


@dataclass(slots=True)
class Match:
    """A match of the last ``length`` tokens: ``text[start:]`` is what followed them."""

    text: Seq[int]
    start: int
    length: int
    periodic: bool = True
    """Whether ``text`` ends where the model is writing."""


class CopyDrafter(Drafter, ABC):
    """Drafts what followed the last tokens where they occurred before: a deterministic chain."""

    @abstractmethod
    def match(self, sequence: Sequence) -> Match | None:
        """The match to copy from, if any, after taking in the tokens that arrived."""

    def length(self, match: Match) -> int:
        """How many tokens are worth copying, the budget aside."""
        return sys.maxsize

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        return [self._chain(one, budget) for one, budget in zip(sequences, budgets, strict=True)]

    def _chain(self, sequence: Sequence, budget: Budget) -> TokenTree:
        depth = min(budget.depth, budget.nodes)
        if depth <= 0 or (match := self.match(sequence)) is None:
            return TokenTree()
        count = min(depth, self.length(match))
        return TokenTree.chain(continuation(match.text, match.start, count, periodic=match.periodic))

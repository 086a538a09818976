"""Drafts under construction: they ask for rows of a drafter's logits until they are complete; who runs the rows is not
their concern."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor


class CandidateTree(ABC):
    """One draft of one request."""

    @abstractmethod
    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        """Read the logits, (n, columns), of the rows asked for last (the root's at first) and ask for more.

        Returns (row that it follows, token) for each row to run next; rows count from 1 in the order in which they
        were asked for, the root is 0. Empty where the draft is complete.
        """

    @abstractmethod
    def tree(self) -> TokenTree:
        """The draft."""

    def learn(  # noqa: B027 - those without calibration have nothing to learn
        self, committed: Seq[int], target_row: Callable[[int], TokenDistribution] | None = None
    ) -> None:
        """``committed``: the tokens that came after the one that it grew from. ``target_row(i)``: the target's
        distribution after i of them; None at temperature 0."""


class Ranking(NamedTuple):
    """What a draft reads of a row of logits: the ``topk`` largest, and what normalises them at a temperature."""

    topk: int
    inverse_temperature: float


class RankedTree(CandidateTree):
    """A draft that reads only the likeliest tokens of each row, so that nobody needs to write whole rows of logits."""

    ranking: Ranking

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        from outpace.targets.top import top_and_totals

        return self.take_best(list(top_and_totals(logits, *self.ranking)))

    @abstractmethod
    def take_best(self, best: Seq[tuple[list[float], list[int], float]]) -> list[tuple[int, int]]:
        """As :meth:`take`, of the ``ranking`` of each row: values, their columns, and the log of the sum of the
        exponentials of all, times the inverse temperature. There may be more than are asked for."""

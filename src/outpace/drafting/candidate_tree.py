"""Drafts under construction: they ask for rows of a drafter's logits until they are complete; who runs the rows is not
their concern."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING

from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import TokenTree
from outpace.targets.branches import Found, GrownTree, Ranking, TreePlan

if TYPE_CHECKING:
    from torch import Tensor


class CandidateTree(ABC):
    """One draft of one request.

    ``ranking``: what it reads of each row of logits; None: all of it.
    """

    ranking: Ranking | None = None

    def plan(self) -> TreePlan | None:
        """What it depends on, where whoever runs its rows may choose them as well and tells it what it has
        :meth:`grown` to."""
        return None

    def grown(self, tree: GrownTree) -> None:
        """It was grown by its :meth:`plan`."""
        raise NotImplementedError("it has no plan")

    def read(self, found: Found, rows: slice) -> list[tuple[int, int]]:
        """As :meth:`take`, of these rows of what was found."""
        assert found.logits is not None
        return self.take(found.logits[rows])

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


class RankedTree(CandidateTree):
    """A draft that reads only the likeliest tokens of each row, so that nobody needs to write whole rows of logits."""

    ranking: Ranking

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        from outpace.targets.top import top_and_totals

        return self.take_best(list(top_and_totals(logits, self.ranking.topk, self.ranking.inverse_temperature)))

    def read(self, found: Found, rows: slice) -> list[tuple[int, int]]:
        return self.take_best(found.best[rows])

    @abstractmethod
    def take_best(self, best: Seq[tuple[list[float], list[int], float]]) -> list[tuple[int, int]]:
        """As :meth:`take`, of the ``ranking`` of each row: values, their columns, and the log of the sum of the
        exponentials of all, times the inverse temperature. There may be more than are asked for."""

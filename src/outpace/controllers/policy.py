"""DraftPolicy: what a controller decides within a draft, before each draw; and what it is told of verdicts.

A policy is asked about the row that a token would be drawn from, before anything is drawn from it, and never sees a
token. So it cannot cut a sampled draw because of what it turned out to be, which would bias the output.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING

from outpace.core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.controllers.base import Budget


class DraftRow(ABC):
    """A drafter's distribution of the next token, before anything is drawn from it."""

    @property
    @abstractmethod
    def highest(self) -> float:
        """The largest probability."""

    @property
    @abstractmethod
    def margin(self) -> float:
        """By how much the largest probability exceeds the second largest."""

    @property
    @abstractmethod
    def entropy(self) -> float:
        """In nats, at least 0."""


class WholeRow(DraftRow):
    """Of all probabilities, (V,) in any order; ``read`` is called once, when something is asked."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    @cached_property
    def _probs(self) -> Tensor:
        return self._read()

    @cached_property
    def _best(self) -> list[float]:
        return [float(value) for value in self._probs.topk(min(2, len(self._probs))).values]

    @property
    def highest(self) -> float:
        return self._best[0]

    @property
    def margin(self) -> float:
        return self._best[0] - (self._best[1] if len(self._best) > 1 else 0.0)

    @cached_property
    def entropy(self) -> float:
        import torch

        return max(0.0, float(torch.special.entr(self._probs.double()).sum()))


class RankedRow(DraftRow):
    """Of the likeliest tokens alone, whose probabilities are ``probs`` in descending order: all others count as one."""

    def __init__(self, probs: Seq[float]) -> None:
        self._probs = probs

    @property
    def highest(self) -> float:
        return self._probs[0]

    @property
    def margin(self) -> float:
        return self._probs[0] - (self._probs[1] if len(self._probs) > 1 else 0.0)

    @property
    def entropy(self) -> float:
        rest = 1.0 - math.fsum(self._probs)
        return math.fsum(-p * math.log(p) for p in (*self._probs, rest) if p > 1e-12)


class DraftPolicy:
    """One request's decisions. The same object lives as long as the request; :meth:`budget` begins a round."""

    spent: float = 0.0
    """What this round's draft takes, in autoregressive steps, as far as the policy knows."""

    def budget(self, budget: Budget) -> Budget:
        """The budget of a round that begins, from what the controller gave."""
        return budget

    def runs(self, depth: int) -> bool:
        """Whether to run the drafter for rows at ``depth`` (1 = first), which takes the time of a level. Not asked for
        the first level."""
        return True

    def draws(self, node: int, above: int | None, depth: int, row: DraftRow, width: int = 1) -> bool:
        """Whether to draw ``width`` tokens from ``row``, which follows ``node`` of the draft, a child of ``above``.

        ``node``: ROOT where ``depth`` is 1; ``above``: None where there is none, or it is not known.
        """
        return True

    def placed(self, nodes: dict[int, int]) -> None:
        """The nodes that :meth:`draws` was asked about have got other numbers in the tree that is proposed."""

    def rated(self, tree: TokenTree) -> None:
        """A deterministic ``tree`` is about to be proposed: the place to state how likely its nodes are accepted."""

    def learn(self, tree: TokenTree, committed: Seq[int]) -> None:
        """The round is over: the ``tree`` that was proposed, empty where nothing was, and the tokens that were
        committed."""


class JudgedRows(DraftPolicy):
    """A policy that learns from the rows that it was asked about, which of them had an accepted child."""

    def __init__(self) -> None:
        self.asked: dict[int, object] = {}
        """What a subclass noted of each row, by the node that the row follows."""

    def budget(self, budget: Budget) -> Budget:
        self.asked = {}
        return budget

    def placed(self, nodes: dict[int, int]) -> None:
        self.asked = {nodes[node]: noted for node, noted in self.asked.items() if node in nodes}

    def learn(self, tree: TokenTree, committed: Seq[int]) -> None:
        path = tree.follow(committed)
        for depth, node in enumerate((ROOT, *path)[: len(committed)], start=1):
            noted, drafted = self.asked.get(node), bool(tree.children(node))
            if noted is not None and drafted:
                self.judged(noted, depth, accepted=depth <= len(path))
        self.asked = {}

    def judged(self, noted: object, depth: int, *, accepted: bool) -> None:
        """Of tokens drawn from a row at ``depth`` one was accepted, or none."""

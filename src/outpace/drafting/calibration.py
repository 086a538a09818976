"""How likely a draft token is to be accepted, learned from what became of earlier ones of its kind.

A drafter sorts its candidates into *kinds* (for example by the length of the match behind them, or by their rank among
siblings) and keeps one :class:`Calibration`. Candidates that were not drafted teach as well: the committed tokens show
whether they would have been accepted. So a kind that is not drafted now is drafted again when its rate justifies it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from outpace.core.tree import ROOT, TokenTree

Kind = Hashable
Prior = Callable[[Any], float]
WEIGHT = 8.0
"""The prior counts as this many observations."""
MEMORY = 400.0
"""Above this many observations of a kind, their weights are halved."""


class Calibration:
    """Acceptance rate by kind of draft token, given that all tokens before it were accepted.

    ``prior(kind)``: the rate, in (0, 1), before anything was observed.
    """

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self._counts: dict[Kind, list[float]] = {}
        self._rates: dict[Kind, float] = {}

    def rate(self, kind: Kind) -> float:
        """The estimated acceptance rate of one kind, in (0, 1)."""
        rate = self._rates.get(kind)
        if rate is None:
            rate = self._rates[kind] = self._prior(kind)
        return rate

    def learn(self, kind: Kind, hit: float) -> None:
        """One candidate of this kind was right (1) or wrong (0), or would have been accepted with probability
        ``hit``."""
        counts = self._counts.get(kind)
        if counts is None:
            counts = self._counts[kind] = [WEIGHT * self._prior(kind), WEIGHT]
        counts[0] += hit
        counts[1] += 1.0
        if counts[1] > MEMORY:
            counts[0] *= 0.5
            counts[1] *= 0.5
        self._rates[kind] = counts[0] / counts[1]

    def learn_tree(self, tree: TokenTree, kinds: list[Kind], committed: Iterable[int]) -> None:
        """Learn from a tree of candidates, drafted or not: ``kinds[node]`` by node, and the tokens that were committed.

        The children of every node on the committed path are right or wrong; nothing is known of all others.
        """
        node = ROOT
        for token in committed:
            right = tree.child(node, token)
            for child in tree.children(node):
                self.learn(kinds[child], child == right)
            if right is None:
                return
            node = right

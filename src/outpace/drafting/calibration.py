"""How likely a draft token is accepted, learned from what became of earlier ones of its kind.

A drafter sorts its draft tokens into *kinds* (the length of the match behind them, their rank among siblings) and
keeps one :class:`Calibration`. Candidates that were not drafted teach as well: the committed tokens say what would have
become of them. So a kind that does not pay now is tried again when it would.
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
"""Of a kind's observations about as many are remembered; older ones fade."""


class Calibration:
    """Acceptance rate by kind of draft token, given that what comes before it was accepted.

    ``prior(kind)``: the rate before anything was seen.
    """

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self._counts: dict[Kind, list[float]] = {}
        self._rates: dict[Kind, float] = {}

    def rate(self, kind: Kind) -> float:
        """The estimate for one kind, in (0, 1)."""
        rate = self._rates.get(kind)
        if rate is None:
            rate = self._rates[kind] = self._prior(kind)
        return rate

    def learn(self, kind: Kind, hit: bool) -> None:
        """One draft token of this kind was right, or not."""
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
        """``tree``: candidates, drafted or not, of ``kinds`` by node; ``committed``: the tokens that came."""
        node = ROOT
        for token in committed:
            right = tree.child(node, token)
            for child in tree.children(node):
                self.learn(kinds[child], child == right)
            if right is None:
                return
            node = right

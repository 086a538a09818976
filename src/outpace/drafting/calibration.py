"""How likely a draft token is to be accepted, learned from what became of earlier ones of its kind.

A drafter sorts its candidates into *kinds* (for example by the length of the match behind them, or by their rank among
siblings) and keeps one :class:`Calibration`. Candidates that were not drafted teach as well: the committed tokens show
whether they would have been accepted. So a kind that is not drafted now is drafted again when its rate justifies it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from outpace.core.tree import ROOT, TokenTree

Kind = Hashable
Prior = Callable[[Any], float]
WEIGHT = 8.0
"""The prior counts as this many observations."""
MEMORY = 400.0
"""Above this many observations of a kind, their weights are halved."""
POOLED_WEIGHT = 16.0
"""What all kinds show together counts for each of them as this many observations."""
FACTOR_PRECISION, MOST_PRECISION = 4.0, 8.0
"""Of the factor's logarithm: before anything was observed (its standard deviation is 1 over the root), and at most."""


class Calibration:
    """Acceptance rate by kind of draft token, given that all tokens before it were accepted.

    ``prior(kind)``: the rate, in (0, 1), before anything was observed.
    """

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self._counts: dict[Kind, list[float]] = {}
        self._rates: dict[Kind, float] = {}
        self._tables: dict[tuple[int, int], array[float]] = {}
        self._places: dict[Kind, list[tuple[array[float], int]]] = {}
        """Where the rate of a kind stands in tables."""

    def rate(self, kind: Kind) -> float:
        """The estimated acceptance rate of one kind, in (0, 1)."""
        rate = self._rates.get(kind)
        if rate is None:
            rate = self._rates[kind] = self._prior(kind)
        return rate

    def table(self, rows: int, columns: int) -> array[float]:
        """The rates of the kinds (1, 0), (1, 1), ... (rows, columns - 1) as they are now, not to be changed."""
        table = self._tables.get((rows, columns))
        if table is None:
            kinds = _pairs(rows, columns)
            table = self._tables[rows, columns] = array("d", map(self.rate, kinds))
            for place, kind in enumerate(kinds):
                self._places.setdefault(kind, []).append((table, place))
        return table

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
        rate = self._rates[kind] = counts[0] / counts[1]
        for table, place in self._places.get(kind, ()):
            table[place] = rate

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

    def learn_path(self, tokens: Iterable[int], kinds: Iterable[Kind], committed: Iterable[int]) -> None:
        """:meth:`learn_tree` for a path: its tokens and their kinds."""
        for token, kind, right in zip(tokens, kinds, committed, strict=False):
            self.learn(kind, token == right)
            if token != right:
                return


def _pairs(rows: int, columns: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(1, rows + 1) for column in range(columns)]


class PooledCalibration(Calibration):
    """The same where kinds differ less than texts do: what one kind shows counts for all of its pool.

    A text that repeats itself more than others does so after short and long matches alike. So the odds of a pool's
    priors are multiplied by one factor, which every observation moves (online logistic regression of its logarithm),
    and kinds keep counts of their own beside it. ``pool(kind)``: which pool a kind is in.
    """

    def __init__(self, prior: Prior, pool: Callable[[Any], Hashable]) -> None:
        super().__init__(prior)
        self._pool = pool
        self._factors: dict[Hashable, _Factor] = {}
        self._kinds: dict[Kind, _Pooled] = {}

    def rate(self, kind: Kind) -> float:
        one = self._kinds.get(kind) or self._new(kind)
        pooled = one.rate()
        return (POOLED_WEIGHT * pooled + one.hits) / (POOLED_WEIGHT + one.seen) if one.seen else pooled

    def table(self, rows: int, columns: int) -> array[float]:
        return array("d", map(self.rate, _pairs(rows, columns)))

    def learn(self, kind: Kind, hit: float) -> None:
        one = self._kinds.get(kind) or self._new(kind)
        one.factor.value = one.factor.value or 1.0
        one.factor.learn(one.rate(), hit)
        one.hits += hit
        one.seen += 1.0
        if one.seen > MEMORY:
            one.hits *= 0.5
            one.seen *= 0.5

    def _new(self, kind: Kind) -> _Pooled:
        factor = self._factors.setdefault(self._pool(kind), _Factor())
        one = self._kinds[kind] = _Pooled(self._prior(kind), factor)
        return one


@dataclass(slots=True)
class _Factor:
    """What multiplies the odds of a pool's priors: ``value``, None before anything was observed."""

    value: float | None = None
    logarithm: float = 0.0
    precision: float = FACTOR_PRECISION

    def learn(self, pooled: float, hit: float) -> None:
        self.precision = min(MOST_PRECISION, self.precision + pooled * (1.0 - pooled))
        self.logarithm += (hit - pooled) / self.precision
        self.value = math.exp(self.logarithm)


@dataclass(slots=True)
class _Pooled:
    """A kind: its prior, the factor of its pool, and what was observed of it."""

    prior: float
    factor: _Factor
    hits: float = 0.0
    seen: float = 0.0

    def rate(self) -> float:
        """What the prior and all kinds of the pool show."""
        value = self.factor.value
        if value is None:
            return self.prior
        odds = self.prior / (1.0 - self.prior) * value
        return odds / (1.0 + odds)

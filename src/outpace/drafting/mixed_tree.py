"""Draft trees of the likeliest tokens and of draws beside them: dynamic trees for requests that sample.

After a node stand its j likeliest tokens, deterministic, and at most one token that is drawn from all others. Of such
sets the optimal transport accepts the probability of the j tokens and the overlap of the rest, sum of min(p, q) over
the other tokens, q being renormalised (Hu et al. 2025, arXiv 2502.18779). Rule ``univer`` attains it, and so does
``recursive-rejection`` where the draw comes first, as here. A single draw is accepted more often than the likeliest
token where the target's distribution is broad, and less often where it is narrow, so every node gets what its
calibrated rates favour. ``benchmarks/acceptance_ceiling.py`` compares proposals.

How many tokens follow a node is decided before any of them is drawn, and nothing that was drawn is left out: a level is
settled when it is run. What became of draws may decide which nodes the next level runs.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from outpace.controllers.base import Budget
from outpace.controllers.policy import RankedRow
from outpace.core.chance import Chance
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import OpenRows, TokenDistribution, dense_distributions
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.calibration import Calibration
from outpace.drafting.candidate_tree import CandidateTree
from outpace.drafting.dynamic_tree import CENTRES, EDGES
from outpace.targets.branches import Best, Found, Ranking

if TYPE_CHECKING:
    from torch import Tensor

CHILDREN_SHARE = 0.5
"""About how much of a node's acceptance probability its children have together."""
FLOOR = 0.02
"""Without costs, draft tokens that are expected to add fewer tokens than this are left out."""
KNOWN = -1
_COLDEST = 1e-3
"""Lower temperatures make the likeliest token certain all the same."""
_LEAST = 1e-4
"""Nothing is drawn where the likeliest tokens have all but so much of the drafter's probability."""
_UNLIKELY = 0.004
"""Less likely tokens are not among a node's deterministic candidates, but for its likeliest."""
_CHEAP = 0.5
"""Nor are those below this share of what rows cost at least, on average: they would be estimated, looked up and learned
from in every round, and hardly ever be drafted."""
_DEEP, _BESIDE, _HOT = 3, 3, 20
"""Depths, numbers of tokens and tenths of the temperature from here on are one kind."""
Kind = tuple[int, int, int, int]
"""(depth, bucket of probability, number of likeliest tokens beside the draw or KNOWN for one of them, temperature in
tenths)."""


def by_probability(kind: Kind) -> float:
    """The acceptance rate of a kind before anything is known (``benchmarks/acceptance_ceiling.py``, eagle3).

    A likely token: heads are too sure of themselves, the more so the lower the temperature. A draw by itself is
    accepted more often than the likeliest token where that is unlikely; beside others it finds what they leave.
    """
    _, bucket, beside, tenths = kind
    centre, temperature = CENTRES[bucket], min(1.0, tenths / 10)
    if beside > 0:
        return min(1.2 * centre, (0.12 + 0.15 * temperature) / math.pow(beside, 0.35))
    sure = 0.1 + 0.75 * temperature
    known = centre * (sure + (1.0 - sure) * 0.65 * math.pow(centre, 12))
    if beside == KNOWN:
        return known
    return min(0.98, known + 0.25 * max(0.0, temperature - 0.4) * (1.0 - centre))


@lru_cache(256)
def _heated(temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingParams:
    """What rows of the drafter are opened with: temperature and cuts."""
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


class _Row(NamedTuple):
    """The likeliest columns of a row with their probabilities, best first. ``distribution``: of all of its columns,
    where cuts made it necessary to open the row; the others are opened where something is drawn."""

    probs: list[float]
    columns: list[int]
    distribution: TokenDistribution | None = None


@dataclass(slots=True)
class _Node:
    """A node that was run. ``columns``: its likeliest tokens, ``kinds``: of these, ``rates``: their calibrated
    acceptance, ``draws``: that of one draw beside j of them, j from 0, with its kind, ``values``: acceptance of the
    best 0, 1, ... children, ``drawing``: whether one of these is drawn."""

    columns: list[int]
    kinds: list[Kind]
    rates: list[float]
    draws: list[tuple[Kind, float]]
    values: list[float]
    drawing: list[bool]
    drawn: tuple[Kind, int, float] | None = None
    """Kind, token and q of the draw that was made."""
    taken: int = 0


class MixedTree(CandidateTree):
    """One draft of one request.

    ``ids`` (Vd): the target's token of each column of the logits, ``row`` the same as a tensor, None
    where the columns are the tokens themselves. ``heat`` multiplies the
    drafter's logits beside 1 / temperature. ``level``: cost of running another level, in autoregressive steps.
    ``open_rows``: from logits to distributions.
    """

    def __init__(
        self,
        params: SamplingParams,
        budget: Budget,
        calibration: Calibration,
        ids: Seq[int],
        row: Tensor | None,
        chance: Chance,
        *,
        expand: int = 4,
        heat: float = 1.0,
        level: float = 0.0,
        open_rows: OpenRows = dense_distributions,
    ) -> None:
        self._params, self._budget, self._calibration = params, budget, calibration
        temperature = max(params.temperature, _COLDEST) / heat
        self._heated = _heated(temperature, params.top_k, params.top_p, params.min_p)
        cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self._scale = 1.0 / temperature
        self.ranking = None if cut else Ranking(budget.topk, self._scale, True)
        self._open_rows = open_rows
        self._ids, self._row, self._chance = ids, row, chance
        self._expand, self._level = expand, level
        self._least = max(_UNLIKELY, _CHEAP * budget.price)
        self._tree = TokenTree()
        self._nodes: dict[int, _Node] = {}
        """What was run, by node of the tree."""
        self._running = [ROOT]
        self._rows = {ROOT: 0}
        self._levels = 0
        self._expected = budget.base_tokens

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        from outpace.targets.top import top_and_totals

        if self.ranking is None:
            return self._take(self._opened(logits), logits)
        return self._take(self._ranked(top_and_totals(logits, self._budget.topk, self._scale)), logits)

    def read(self, found: Found, rows: slice) -> list[tuple[int, int]]:
        assert found.logits is not None
        logits = found.logits[rows]
        return self._take(self._opened(logits) if self.ranking is None else self._ranked(found.best[rows]), logits)

    def _take(self, rows: Seq[_Row], logits: Tensor) -> list[tuple[int, int]]:
        for node, row in zip(self._running, rows, strict=True):
            self._read(node, row)
        self._choose()
        self._running = self._next(self._add(rows, logits))
        self._levels += bool(self._running)
        wanted = []
        for node in self._running:
            wanted.append((self._rows[self._tree.parents[node]], self._tree.tokens[node]))
            self._rows[node] = len(self._rows)
        return wanted

    def _ranked(self, best: Iterable[Best]) -> list[_Row]:
        """Probabilities from logits and what normalises them, at the request's temperature."""
        topk, scale = self._budget.topk, self._scale
        return [
            _Row([math.exp(scale * value - total) for value in values[:topk]], columns[:topk])
            if math.isfinite(total)
            else _Row([], [])  # no token can follow
            for values, columns, total in best
        ]

    def _opened(self, logits: Tensor) -> list[_Row]:
        """The same with the request's cuts, for which whole rows must be read."""
        from outpace.targets.top import top

        opened = self._open_rows(logits, range(len(logits)), self._heated)
        return [
            _Row([], [])
            if one is None
            else _Row([one[k] if value > -math.inf else 0.0 for value, k in zip(*best, strict=True)], best[1], one)
            for best, one in zip(top(logits, self._budget.topk), opened, strict=True)
        ]

    def _read(self, node: int, row: _Row) -> None:
        """Candidates after ``node``, and what is expected of them."""
        depth = 1 if node == ROOT else 1 + self._tree.depths[node]
        probs, columns = row.probs, row.columns
        if not probs or not probs[0] > 0.0 or not self._budget.wants(depth, probs[0]):
            return
        above = None if node == ROOT else self._tree.parents[node]
        if self._budget.policy is not None and not self._budget.draws(node, above, depth, RankedRow(probs)):
            return
        rate_of, heat = self._calibration.rate, min(_HOT, round(10 * self._params.temperature))
        likely, drawn = min(depth, _DEEP), min(depth, _DEEP - 1)
        kinds, rates, draws, values, drawing = [], [], [], [0.0], [False]
        beyond, known = 1.0, 0.0
        for beside, p in enumerate(probs):
            bucket = bisect(EDGES, p)
            kind = drawn, bisect(EDGES, beyond) if beside else bucket, min(beside, _BESIDE), heat
            draw = rate_of(kind) if beyond > _LEAST else 0.0
            draws.append((kind, draw))
            values.append(known + draw)  # of the best children, one more than before: with a draw,
            drawing.append(draw > 0.0)
            if beside and not p >= self._least:
                break
            kind = likely, bucket, KNOWN, heat
            kinds.append(kind)
            rate = min(0.995, p * rate_of(kind) / CENTRES[bucket])
            rates.append(rate)
            known += rate
            if known >= values[-1]:  # or without
                values[-1], drawing[-1] = known, False
            beyond -= p
        self._nodes[node] = _Node(columns[: len(kinds)], kinds, rates, draws, values, drawing)

    def _choose(self) -> None:
        """How many children each node of this level gets: the most valuable first, while they are worth their rows."""
        count = len(self._tree)
        unsettled = [node for node in self._running if node in self._nodes]
        while unsettled and count < self._budget.max_nodes:
            node = max(unsettled, key=lambda node: (self._marginal(node), -node))
            gain = self._marginal(node)
            if gain <= self._row_cost(count):
                return
            one = self._nodes[node]
            one.taken += 1
            self._expected += gain
            count += 1
            if one.taken >= min(self._budget.topk, len(one.values) - 1):
                unsettled.remove(node)

    def _marginal(self, node: int) -> float:
        one = self._nodes[node]
        return self._before(node) * (one.values[one.taken + 1] - one.values[one.taken])

    def _before(self, node: int) -> float:
        return 1.0 if node == ROOT else self._tree.path_acceptance_probs[node]

    def _row_cost(self, count: int) -> float:
        """What the row of another draft token after ``count`` costs, in tokens."""
        costs = self._budget.relative_costs
        if not costs:
            return FLOOR
        if count + 1 >= len(costs):
            return math.inf
        return self._pace(count) * (costs[count + 1] - costs[count])

    def _pace(self, count: int) -> float:
        """Tokens per autoregressive step of the round as it is."""
        return self._expected / (self._budget.relative_costs[count] + self._level * self._levels)

    def _add(self, rows: Seq[_Row], logits: Tensor) -> list[int]:
        """Add the children that were decided on; returns their nodes."""
        taken = [(self._nodes[node], node, at) for at, node in enumerate(self._running) if node in self._nodes]
        rests = self._rests({at: one for one, _, at in taken if one.drawing[one.taken]}, rows, logits)
        born = list[int]()
        for one, node, at in taken:
            rest = rests.get(at)
            known = one.columns[: one.taken - (rest is not None)]
            before = self._before(node)
            if rest is not None:
                column = self._chance.categorical(rest)
                kind, rate = one.draws[len(known)]
                token, q = self._ids[column], rest[column]
                one.drawn = kind, token, q
                born.append(self._tree.add(node, token, QRow(rest, self._row, (token, q)), before * rate))
            for column, rate in zip(known, one.rates, strict=False):
                born.append(self._tree.add(node, self._ids[column], path_acceptance_prob=before * rate))
        return born

    def _rests(self, drawing: Mapping[int, _Node], rows: Seq[_Row], logits: Tensor) -> dict[int, TokenDistribution]:
        """What the rows that something is drawn from leave beside their likeliest tokens, where that is anything."""
        closed = [at for at in drawing if rows[at].distribution is None]
        opened = iter(self._open_rows(logits, closed, self._heated) if closed else ())
        rests = dict[int, TokenDistribution]()
        for at, one in drawing.items():
            whole = rows[at].distribution or next(opened)
            if whole is None:  # a row of logits that are no numbers
                continue
            rest, left = whole.residual(None, one.columns[: one.taken - 1])
            if left > 0.0:  # by rounding something may have seemed to be left
                rests[at] = rest
        return rests

    def _next(self, born: Seq[int]) -> list[int]:
        """Those of the new nodes to run next, the likeliest first; none where another level is not worth it."""
        probs = self._tree.path_acceptance_probs
        found = [node for node in born if self._tree.depths[node] < self._budget.depth]
        found = sorted(found, key=lambda node: (-probs[node], node))[: self._expand]
        count = len(self._tree)
        if count >= self._budget.max_nodes:
            return []
        if not self._budget.relative_costs:
            return found
        row = self._row_cost(count)
        gains = [gain for node in found if (gain := CHILDREN_SHARE * probs[node] - row) > 0.0]
        return found[: len(gains)] if sum(gains) > self._pace(count) * self._level else []

    def tree(self) -> TokenTree:
        return self._tree

    def learn(self, committed: Seq[int], target_row: Callable[[int], TokenDistribution] | None = None) -> None:
        """Teach the calibration. ``target_row(i)``: the target's distribution after i committed tokens."""
        if target_row is None:
            return
        node: int | None = ROOT
        for index, token in enumerate(committed):
            if node is None or (one := self._nodes.get(node)) is None:
                return
            p = target_row(index)
            for kind, column in zip(one.kinds, one.columns, strict=True):
                self._calibration.learn(kind, p[self._ids[column]])
            if one.drawn is not None:
                kind, drawn, q = one.drawn
                self._calibration.learn(kind, min(1.0, p[drawn] / q))
            node = self._tree.child(node, token)

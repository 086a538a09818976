"""How a draft grows from a feature drafter's words: the paths that are likeliest to be accepted, or samples.

:class:`DynamicTree` is deterministic, after EAGLE-2 (Li et al. 2024, arXiv 2406.16858): a path is worth the product
of what its tokens are worth, the most promising nodes are expanded a level at a time, and of all nodes that were
looked at the best are drafted. Beside the paper: probabilities become the acceptance rates that such probabilities
have had; a node that was passed over may be expanded with a later level; and levels and draft tokens end where they
no longer pay.

:class:`SampledTree` runs any of the samplers of :mod:`outpace.drafting.sampled_trees`, over the target's vocabulary:
words that the drafter does not have have probability zero there, before the request's own processors.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outpace.controllers.base import Budget
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.calibration import Calibration
from outpace.drafting.tree_builder import TreeBuilder
from outpace.targets.top import top, top_and_totals

EDGES = (0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.42, 0.55, 0.68, 0.8, 0.9, 0.97)
CENTRES = (0.005, 0.015, 0.03, 0.055, 0.095, 0.16, 0.25, 0.36, 0.485, 0.615, 0.74, 0.85, 0.935, 0.985)
"""Probabilities of one kind lie between two edges."""
DEEP = 5
"""Depths from here on are one kind."""
AHEAD = 0.8
"""About how much of a node's worth its children have together."""
RANKS = (0.62, 0.14, 0.07, 0.04, 0.03, 0.02)
"""Acceptance by rank among siblings before anything is known, the last one's for all beyond."""
FLOOR = 0.005
"""Paths less likely than this are not looked at."""
Kind = tuple[int, int]


def by_confidence(kind: Kind) -> float:
    """The rate of (depth, bucket of probability) before anything is known: the probability itself."""
    return CENTRES[kind[1]]


def by_rank(kind: Kind) -> float:
    """The rate of (depth, rank among siblings) before anything is known."""
    return RANKS[min(kind[1], len(RANKS) - 1)]


class DynamicTree:
    """A draft of one request. ``ids``: the target's id of each word. ``expand``: most nodes that a level runs.

    ``confident``: whether nodes are worth what the drafter says of them, or what their ranks are worth: then the tree
    is a fixed shape, as EAGLE's first version has it. ``level``: what running a level costs, in plain steps.
    """

    def __init__(
        self,
        budget: Budget,
        calibration: Calibration,
        ids: Seq[int],
        *,
        expand: int = 4,
        confident: bool = True,
        inverse_temperature: float = 1.0,
        level: float = 0.0,
    ) -> None:
        self._budget, self._calibration, self._ids = budget, calibration, ids
        self._expand, self._confident, self._inverse_temperature, self._level = (
            expand,
            confident,
            inverse_temperature,
            level,
        )
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._kinds: list[Kind] = []
        self._worth: list[float] = []
        self._children: dict[int, list[int]] = {}
        self._running: list[int] = [ROOT]
        self._rows = {ROOT: 0}
        self._levels = 0
        self._open: list[int] = []
        """Nodes that may be expanded."""

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        for node, (values, words, total) in zip(self._running, self._best(logits), strict=True):
            self._add(node, total, values, words)
        self._running = self._next()
        self._levels += bool(self._running)
        wanted = []
        for node in self._running:
            wanted.append((self._rows[self._parents[node]], self._tokens[node]))
            self._rows[node] = len(self._rows)
        return wanted

    def _best(self, logits: Tensor) -> Iterable[tuple[list[float], list[int], float]]:
        """The likeliest words of each row with their logits, and what makes probabilities of these."""
        width = self._budget.width
        if not self._confident and self._budget.confidence <= 0.0:
            return ((*best, 0.0) for best in top(logits, width))
        return top_and_totals(logits, width, self._inverse_temperature)

    def _add(self, node: int, total: float, values: list[float], words: list[int]) -> None:
        """The likeliest tokens after ``node`` become candidates."""
        depth = 1 if node == ROOT else self._depths[node] + 1
        before = 1.0 if node == ROOT else self._worth[node]
        rate, deep, inverse_temperature = self._calibration.rate, min(depth, DEEP), self._inverse_temperature
        if self._budget.confidence > 0.0 and not self._budget.wants(
            depth, math.exp(values[0] * inverse_temperature - total)
        ):
            return
        born = self._children[node] = []
        for rank, (value, word) in enumerate(zip(values, words, strict=True)):
            if self._confident:
                p = math.exp(min(0.0, value * inverse_temperature - total))
                kind = deep, bisect(EDGES, p)
                worth = before * min(0.995, p * rate(kind) / CENTRES[kind[1]])
            else:
                kind = deep, rank
                worth = before * rate(kind)
            if worth < FLOOR and rank:
                continue
            new = len(self._tokens)
            self._tokens.append(self._ids[word])
            self._parents.append(node)
            self._depths.append(depth)
            self._kinds.append(kind)
            self._worth.append(worth)
            born.append(new)
            if depth < self._budget.depth:
                self._open.append(new)

    def _next(self) -> list[int]:
        """Nodes to expand: the best of those that pay, as many as a level may run."""
        if not self._open:
            return []
        worth, budget = self._worth, self._budget
        order = self._order()
        if budget.relative_costs:
            ranked = [worth[node] for node in order]
            count = budget.best_draft_size(ranked)
            most = len(budget.relative_costs) - 1
            pace = (1.0 + sum(ranked[:count])) / (budget.relative_costs[count] + self._level * self._levels)
            row = budget.relative_costs[min(count + 1, most)] - budget.relative_costs[min(count, most - 1)]
            best = sorted(
                (node for node in self._open if AHEAD * worth[node] > pace * row), key=lambda n: (-worth[n], n)
            )
            best = best[: self._expand]
            # What the level brings, less its draft tokens' price, must outweigh the level's own.
            if sum(AHEAD * worth[node] - pace * row for node in best) <= pace * self._level:
                return []
        else:
            kept = set(order[: budget.nodes])
            best = [node for node in self._open if node in kept]
            best = sorted(best, key=lambda node: (-worth[node], node))[: self._expand]
        expanded = set(best)
        self._open = [node for node in self._open if node not in expanded]
        return best

    def _order(self) -> list[int]:
        """Candidates, the likeliest first; of equals the earlier, so that parents come before children."""
        worth = self._worth
        return sorted(range(len(worth)), key=lambda node: (-worth[node], node))

    def tree(self) -> TokenTree:
        order = self._order()
        tree, where = TokenTree(), {ROOT: ROOT}
        for node in order[: self._budget.best_draft_size([self._worth[node] for node in order])]:
            where[node] = tree.add(
                where[self._parents[node]], self._tokens[node], path_acceptance_prob=self._worth[node]
            )
        return tree

    def learn(self, committed: Seq[int]) -> None:
        """All candidates teach, drafted or not: what was committed says what would have become of them."""
        node = ROOT
        for token in committed:
            right = ROOT
            for child in self._children.get(node, ()):
                hit = self._tokens[child] == token
                self._calibration.learn(self._kinds[child], hit)
                if hit:
                    right = child
            if right == ROOT:
                return
            node = right


class SampledTree:
    """Lets ``builder`` draw; ``ids`` (Vd,): the target's id of each word, of ``vocab_size``."""

    def __init__(self, builder: TreeBuilder, ids: Tensor, vocab_size: int) -> None:
        self._builder, self._ids, self._vocab_size = builder, ids, vocab_size
        self._logits: Tensor | None = None

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf, dtype=torch.float32)
        whole[:, self._ids.to(logits.device)] = logits.float()
        self._logits = whole if self._logits is None else torch.cat([self._logits, whole])
        run = self._builder.run
        before = len(run)
        if not self._builder.grow(self._logits):
            return []
        return [(run.parents[node] + 1, run.tokens[node]) for node in range(before, len(run))]

    def tree(self) -> TokenTree:
        return self._builder.proposal()

    def learn(self, committed: Seq[int]) -> None:
        """Draws are made from the drafter's own distribution, whatever became of earlier ones."""

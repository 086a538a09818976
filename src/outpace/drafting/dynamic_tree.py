"""Deterministic draft trees by marginal cost, and sampled ones behind the same interface.

:class:`DynamicTree` follows EAGLE-2 (Li et al. 2024, arXiv 2406.16858): the probability that a path is accepted is the
product of its tokens' probabilities, the most promising nodes are expanded a level at a time, and the best of all
candidates are drafted. Beside the paper: probabilities are calibrated by what became of earlier candidates of their
kind; a node that was passed over may be expanded with a later level; and where the budget has costs, levels and draft
tokens end where the next one costs more than it is expected to bring.

The tree asks for rows and reads their logits; who runs them is not its concern. Feature drafters run them in a head
(:mod:`outpace.heads.feature_drafter`); :class:`DynamicTreeBuilder` has a draft model run them.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.calibration import Calibration
from outpace.drafting.tree_builder import TreeBuilder
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from torch import Tensor

EDGES = (0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.42, 0.55, 0.68, 0.8, 0.9, 0.97)
CENTRES = (0.005, 0.015, 0.03, 0.055, 0.095, 0.16, 0.25, 0.36, 0.485, 0.615, 0.74, 0.85, 0.935, 0.985)
"""Probabilities of one kind lie between two edges."""
DEEP = 5
"""Depths from here on are one kind."""
CHILDREN_SHARE = 0.8
"""About how much of a node's acceptance probability its children have together."""
RANKS = (0.62, 0.14, 0.07, 0.04, 0.03, 0.02)
"""Acceptance by rank among siblings before anything is known, the last one's for all beyond."""
FLOOR = 0.005
"""Calibrated candidates less likely than this are left out, but for the likeliest of each node."""
Kind = tuple[int, int]


def by_confidence(kind: Kind) -> float:
    """The acceptance rate of (depth, bucket of probability) before anything is known: the probability itself."""
    return CENTRES[kind[1]]


def by_rank(kind: Kind) -> float:
    """The acceptance rate of (depth, rank among siblings) before anything is known."""
    return RANKS[min(kind[1], len(RANKS) - 1)]


class Candidate(NamedTuple):
    """A node that may be drafted. ``parent``: index of the candidate before it; ``kind``: None without calibration."""

    token: int
    parent: int
    depth: int
    kind: Kind | None
    path_acceptance_prob: float


class DynamicTree:
    """One deterministic draft of one request. ``ids``: the target's token id of each column of the logits.

    ``calibration``: acceptance rates by kind; None takes probabilities as they are. ``confident``: kinds are buckets of
    probability; otherwise ranks among siblings, so that the tree has a fixed shape, as in EAGLE's first version
    (Li et al. 2024, arXiv 2401.15077). ``expand``: most nodes that one level runs. ``inverse_temperature`` multiplies
    the logits. ``level``: cost of running another level, in autoregressive steps.

    With ``budget.relative_costs`` a node is expanded where its expected children are worth their rows; without, the
    best ``budget.max_nodes`` candidates are drafted. A path is never likelier than its beginning, so that the best
    candidates are a tree, and what is outside of them now stays outside.
    """

    def __init__(
        self,
        budget: Budget,
        calibration: Calibration | None,
        ids: Seq[int],
        *,
        expand: int = 4,
        confident: bool = True,
        inverse_temperature: float = 1.0,
        level: float = 0.0,
    ) -> None:
        self._budget, self._calibration, self._ids = budget, calibration, ids
        self._expand, self._confident = expand, confident
        self._inverse_temperature, self._level = inverse_temperature, level
        self._candidates: list[Candidate] = []
        self._children: dict[int, list[int]] = {}
        self._running: list[int] = [ROOT]
        self._rows = {ROOT: 0}
        self._levels = 0
        self._open: set[int] = set()
        """Candidates that may be expanded."""

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        """Read the logits, (n, columns), of the rows asked for last (the root's at first) and ask for more.

        Returns (row that it follows, token) for each row to run next; rows count from 1 in the order in which they
        were asked for, the root is 0. Empty where the draft is complete.
        """
        for node, (values, columns, total) in zip(self._running, self._best(logits), strict=True):
            self._add(node, total, values, columns)
        self._running = self._next()
        self._levels += bool(self._running)
        wanted = []
        for node in self._running:
            one = self._candidates[node]
            wanted.append((self._rows[one.parent], one.token))
            self._rows[node] = len(self._rows)
        return wanted

    def _best(self, logits: Tensor) -> Iterable[tuple[list[float], list[int], float]]:
        """The likeliest columns of each row with their logits, and the log of what normalises them."""
        from outpace.targets.top import top, top_and_totals

        topk = self._budget.topk
        if not self._confident and self._budget.confidence <= 0.0:
            return ((*best, 0.0) for best in top(logits, topk))
        return top_and_totals(logits, topk, self._inverse_temperature)

    def _add(self, node: int, total: float, values: list[float], columns: list[int]) -> None:
        """The likeliest tokens after ``node`` become candidates."""
        if values[0] == -math.inf:
            return  # no token can follow
        depth, before = 1, 1.0
        if node != ROOT:
            depth, before = 1 + self._candidates[node].depth, self._candidates[node].path_acceptance_prob
        probs = [math.exp(min(0.0, value * self._inverse_temperature - total)) for value in values]
        if self._budget.confidence > 0.0 and not self._budget.wants(depth, probs[0]):
            return
        children = self._children[node] = []
        for rank, (p, column) in enumerate(zip(probs, columns, strict=True)):
            kind, rate = self._rate(depth, rank, p)
            if values[rank] == -math.inf or (kind is not None and rank and before * rate < FLOOR):
                continue
            new = len(self._candidates)
            self._candidates.append(Candidate(self._ids[column], node, depth, kind, before * rate))
            children.append(new)
            if depth < self._budget.depth:
                self._open.add(new)

    def _rate(self, depth: int, rank: int, p: float) -> tuple[Kind | None, float]:
        """A candidate's kind, and how likely it is accepted after its parent."""
        if self._calibration is None:
            return None, p
        if not self._confident:
            kind = min(depth, DEEP), rank
            return kind, self._calibration.rate(kind)
        bucket = bisect(EDGES, p)
        kind = min(depth, DEEP), bucket
        return kind, min(0.995, p * self._calibration.rate(kind) / CENTRES[bucket])

    def _next(self) -> list[int]:
        """The candidates to expand, likeliest first, at most ``expand``; empty where no further level is worth it."""
        order = self._order()
        found = [node for node in order[: self._budget.max_nodes] if node in self._open][: self._expand]
        if self._budget.relative_costs:
            found = self._worthwhile(found, order)
        self._open.difference_update(found)
        return found

    def _worthwhile(self, found: list[int], order: list[int]) -> list[int]:
        """Those whose children are expected to outweigh their rows; none where they do not outweigh the level too."""
        costs = self._budget.relative_costs
        probs = [self._candidates[node].path_acceptance_prob for node in order]
        count, most = self._budget.best_draft_size(probs), len(costs) - 1
        pace = (1.0 + sum(probs[:count])) / (costs[count] + self._level * self._levels)
        row = pace * (costs[min(count + 1, most)] - costs[min(count, most - 1)])
        gains = [CHILDREN_SHARE * self._candidates[node].path_acceptance_prob - row for node in found]
        gains = [gain for gain in gains if gain > 0.0]  # the likeliest come first
        return found[: len(gains)] if sum(gains) > pace * self._level else []

    def _order(self) -> list[int]:
        """All candidates, the likeliest first; of equals the earlier, so that parents come before children."""
        candidates = self._candidates
        return sorted(range(len(candidates)), key=lambda node: (-candidates[node].path_acceptance_prob, node))

    def tree(self) -> TokenTree:
        """The draft: the best candidates, as many as the budget allows and its costs justify, likeliest first."""
        order = self._order()
        probs = [self._candidates[node].path_acceptance_prob for node in order]
        tree, where = TokenTree(), {ROOT: ROOT}
        for node in order[: self._budget.best_draft_size(probs)]:
            one = self._candidates[node]
            where[node] = tree.add(where[one.parent], one.token, path_acceptance_prob=one.path_acceptance_prob)
        return tree

    def learn(self, committed: Seq[int], target_row: Callable[[int], Tensor] | None = None) -> None:
        """Teach the calibration: ``committed`` shows of all candidates, drafted or not, which would have been right.

        ``target_row(i)``: the target's distribution, (V,), after i committed tokens. Then what is learned is how likely
        each candidate was, which varies less than whether it was drawn.
        """
        if self._calibration is None:
            return
        node = ROOT
        for index, token in enumerate(committed):
            right = ROOT
            children = self._children.get(node, ())
            p = target_row(index) if target_row is not None and children else None
            for child in children:
                one = self._candidates[child]
                assert one.kind is not None
                self._calibration.learn(one.kind, one.token == token if p is None else float(p[one.token]))
                if one.token == token:
                    right = child
            if right == ROOT:
                return
            node = right


class DynamicTreeBuilder(TreeBuilder):
    """A draft model runs the rows that ``candidates`` ask for.

    By default these are the most probable paths under the distribution that the request samples from (as SpecInfer,
    Miao et al. 2024, arXiv 2305.09781, expands by top-k), deterministic at every temperature.
    """

    def __init__(
        self, sequence: Sequence, budget: Budget, chance: Chance, candidates: DynamicTree | None = None
    ) -> None:
        super().__init__(sequence, budget, chance)
        whole = range(sequence.sampler.vocab_size)
        self._candidates = candidates or DynamicTree(budget, None, whole, expand=budget.max_nodes)
        self._asked = [ROOT]
        """The nodes of ``_drafted`` that ran last."""

    def grow(self, logits: Tensor) -> bool:
        wanted = self._candidates.take(self._rows(logits))
        self._asked = [self._run_after(row - 1, token) for row, token in wanted]
        return bool(wanted)

    def _rows(self, logits: Tensor) -> Tensor:
        """Logits after every node that ran last, (n, V), to rank tokens by."""
        return self._ranking(self._distribution(logits), self._asked)

    def proposal(self) -> TokenTree:
        return self._candidates.tree()

    def learn(self, committed: Seq[int]) -> None:
        self._candidates.learn(committed)


class SampledTree:
    """Lets ``builder`` draw over the target's vocabulary, for drafters that ask with ``take`` as for a DynamicTree.

    ``ids`` (Vd,): the target's id of each column of the logits; other tokens of the ``vocab_size`` have probability
    zero, before the request's own processors.
    """

    def __init__(self, builder: TreeBuilder, ids: Tensor, vocab_size: int) -> None:
        self._builder, self._ids, self._vocab_size = builder, ids, vocab_size
        self._logits: Tensor | None = None

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        """As :meth:`DynamicTree.take`."""
        import torch

        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf, dtype=torch.float32)
        whole[:, self._ids.to(logits.device)] = logits.float()
        self._logits = whole if self._logits is None else torch.cat([self._logits, whole])
        run = self._builder.run
        before = len(run)
        if not self._builder.grow(self._logits):
            return []
        return [(run.parents[node] + 1, run.tokens[node]) for node in range(before, len(run))]

    def tree(self) -> TokenTree:
        """The draft."""
        return self._builder.proposal()

    def learn(self, committed: Seq[int], target_row: Callable[[int], Tensor] | None = None) -> None:
        """Nothing: draws are made from the drafter's own distribution, whatever became of earlier ones."""

"""Deterministic draft trees by marginal cost.

:class:`DynamicTree` follows EAGLE-2 (Li et al. 2024, arXiv 2406.16858): the probability that a path is accepted is the
product of its tokens' probabilities, the most promising nodes are expanded a level at a time, and the best of all
candidates are drafted. Beside the paper: probabilities are calibrated by what became of earlier candidates of their
kind; a node that was passed over may be expanded with a later level; and where the budget has costs, levels and draft
tokens end where the next one costs more than it is expected to bring.

The tree asks for rows and reads their logits; who runs them is not its concern. Feature drafters run them in a head
(:mod:`outpace.heads.feature_drafter`); :mod:`outpace.drafting.dynamic_tree_builder` has a draft model run them. Where
the compiled kernels choose the rows themselves (``native/draft_tree.h``) they compute what is computed here in the same
order, so drafts are equal.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect, insort
from collections.abc import Callable, Sequence as Seq
from functools import reduce
from operator import add

from outpace.controllers.base import Budget
from outpace.controllers.policy import RankedRow
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.calibration import Calibration
from outpace.drafting.candidate_tree import RankedTree
from outpace.targets.branches import GrownTree, KindRates, Ranking, TreePlan

EDGES = (0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.42, 0.55, 0.68, 0.8, 0.9, 0.97)
CENTRES = (0.005, 0.015, 0.03, 0.055, 0.095, 0.16, 0.25, 0.36, 0.485, 0.615, 0.74, 0.85, 0.935, 0.985)
"""Probabilities of one kind lie between two edges."""
DEEP = 5
"""Depths from here on are one kind."""
CHILDREN_SHARE = 0.8
"""About how much of a node's acceptance probability its children have together."""
RANKS = (0.62, 0.14, 0.07, 0.04, 0.03, 0.02)
"""Acceptance by rank among siblings before anything is known, the last one's for all beyond."""
FLOOR, CEILING = 0.005, 0.995
"""Calibrated candidates less likely than the one are left out, but for the likeliest of each node; by probability none
is likelier than the other."""
_EDGES, _CENTRES = array("d", EDGES), array("d", CENTRES)
Kind = tuple[int, int]


def by_confidence(kind: Kind) -> float:
    """The acceptance rate of (depth, bucket of probability) before anything is known: the probability itself."""
    return CENTRES[kind[1]]


def by_rank(kind: Kind) -> float:
    """The acceptance rate of (depth, rank among siblings) before anything is known."""
    return RANKS[min(kind[1], len(RANKS) - 1)]


class DynamicTree(RankedTree):
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
        self.ranking = Ranking(budget.topk, inverse_temperature)
        self._budget, self._calibration, self._ids = budget, calibration, ids
        self._expand, self._confident, self._level = expand, confident, level
        # Candidates by number, their parents first. A kind is None without calibration.
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._kinds: list[Kind | None] = []
        self._probs: list[float] = []
        """How likely the path to each is accepted."""
        self._best: list[tuple[float, int]] = []
        """The likeliest as (-probability, number), ascending: of equals the earlier first, so that parents come before
        children. Never more than can be drafted."""
        self._children: dict[int, range] = {}
        self._running: list[int] = [ROOT]
        self._rows = {ROOT: 0}
        self._levels = 0
        self._open: set[int] = set()
        """Candidates that may be expanded."""
        self._grown: GrownTree | None = None

    def plan(self) -> TreePlan | None:
        budget = self._budget
        if budget.policy is not None:
            return None
        return TreePlan(
            budget.depth,
            budget.max_nodes,
            budget.topk,
            self._expand,
            budget.confidence,
            budget.base_tokens,
            self._level,
            self.ranking.inverse_temperature,
            CHILDREN_SHARE,
            budget.relative_costs,
            self._ids if isinstance(self._ids, array) else array("i", self._ids),
            self._kind_rates(),
        )

    def _kind_rates(self) -> KindRates | None:
        if self._calibration is None:
            return None
        width = self._kinds_a_depth
        edges, centres = (_EDGES, _CENTRES) if self._confident else (None, None)
        return KindRates(self._calibration.table(DEEP, width), DEEP, width, edges, centres, FLOOR, CEILING)

    @property
    def _kinds_a_depth(self) -> int:
        return len(CENTRES) if self._confident else self._budget.topk

    def grown(self, tree: GrownTree) -> None:
        self._grown = tree

    def _after(self, node: int) -> Seq[int]:
        """The candidates that follow one, or the root."""
        grown = self._grown
        if grown is None:
            return self._children.get(node, ())
        if node not in grown.rows:
            return ()
        row = grown.rows.index(node)
        return range(grown.firsts[row], grown.firsts[row + 1])

    def _kind(self, candidate: int) -> Kind:
        if self._grown is None:
            kind = self._kinds[candidate]
            assert kind is not None
            return kind
        depth, place = divmod(self._grown.kinds[candidate], self._kinds_a_depth)
        return 1 + depth, place

    def take_best(self, best: Seq[tuple[list[float], list[int], float]]) -> list[tuple[int, int]]:
        for node, (values, columns, total) in zip(self._running, best, strict=True):
            self._add(node, total, values, columns)
        found = self._running = self._next()
        if not found:
            return []
        self._levels += 1
        rows, parents, tokens = self._rows, self._parents, self._tokens
        wanted = []
        for node in found:
            wanted.append((rows[parents[node]], tokens[node]))
            rows[node] = len(rows)
        return wanted

    def _add(self, node: int, total: float, values: list[float], columns: list[int]) -> None:
        """The likeliest tokens after ``node`` become candidates."""
        budget, scale = self._budget, self.ranking.inverse_temperature
        if values[0] == -math.inf:
            return  # no token can follow
        depth, before = 1, 1.0
        if node != ROOT:
            depth, before = 1 + self._depths[node], self._probs[node]
        if budget.confidence > 0.0 and not budget.wants(depth, math.exp(min(0.0, values[0] * scale - total))):
            return
        if budget.policy is not None:
            likely = [math.exp(min(0.0, value * scale - total)) for value in values if value > -math.inf]
            above = None if node == ROOT else self._parents[node]
            if not budget.draws(node, above, depth, RankedRow(likely), budget.topk):
                return
        first = number = len(self._tokens)
        calibrated, ids, best, most = self._calibration is not None, self._ids, self._best, budget.max_nodes
        deeper, level = depth < budget.depth, min(depth, DEEP)
        kind: Kind | None = None
        for rank in range(min(budget.topk, len(values))):
            value = values[rank]
            log = value * scale - total
            prob = math.exp(log) if log < 0.0 else 1.0
            if calibrated:
                kind, prob = self._rate(level, rank, prob)
            prob *= before
            if value == -math.inf or (calibrated and rank and prob < FLOOR):
                continue
            self._tokens.append(ids[columns[rank]])
            self._kinds.append(kind)
            self._probs.append(prob)
            if len(best) < most or (best and -prob < best[-1][0]):
                insort(best, (-prob, number))
                if len(best) > most:
                    best.pop()
                if deeper:
                    self._open.add(number)
            number += 1
        self._parents += [node] * (number - first)
        self._depths += [depth] * (number - first)
        self._children[node] = range(first, number)

    def _rate(self, level: int, rank: int, p: float) -> tuple[Kind, float]:
        """A candidate's kind, and how likely it is accepted after its parent, where rates are learned."""
        assert self._calibration is not None
        if not self._confident:
            kind = level, rank
            return kind, self._calibration.rate(kind)
        bucket = bisect(EDGES, p)
        kind = level, bucket
        rate = p * self._calibration.rate(kind) / CENTRES[bucket]
        return kind, rate if rate < CEILING else CEILING

    def _next(self) -> list[int]:
        """The candidates to expand, likeliest first, at most ``expand``; empty where no further level is worth it."""
        waiting, most = self._open, self._expand
        found: list[int] = []
        if not waiting:
            return found
        for _, node in self._best:
            if node in waiting:
                found.append(node)
                if len(found) == most:
                    break
        if self._budget.relative_costs:
            found = self._worthwhile(found)
        waiting.difference_update(found)
        return found

    def _worthwhile(self, found: list[int]) -> list[int]:
        """Those whose children are expected to outweigh their rows; none where they do not outweigh the level too."""
        costs = self._budget.relative_costs
        probs = [-key for key, _ in self._best]
        count, most = self._budget.best_draft_size(probs), len(costs) - 1
        # Sums are added up one by one: ``sum`` rounds otherwise since Python 3.12, and the kernels are to do the same.
        expected = reduce(add, probs[:count], self._budget.base_tokens)
        pace = expected / (costs[count] + self._level * self._levels)
        row = pace * (costs[min(count + 1, most)] - costs[min(count, most - 1)])
        gains = [CHILDREN_SHARE * self._probs[node] - row for node in found]
        gains = [gain for gain in gains if gain > 0.0]  # the likeliest come first
        return found[: len(gains)] if reduce(add, gains, 0.0) > pace * self._level else []

    def tree(self) -> TokenTree:
        """The draft: the best candidates, as many as the budget allows and its costs justify, likeliest first."""
        if self._grown is not None:
            return TokenTree.deterministic(*self._grown[:4])
        size = self._budget.best_draft_size([-key for key, _ in self._best])
        tree, where = TokenTree(), {ROOT: ROOT}
        for key, node in self._best[:size]:
            parent, token = where[self._parents[node]], self._tokens[node]
            where[node] = tree.add(parent, token, path_acceptance_prob=-key)
        if self._budget.policy is not None:
            self._budget.policy.placed(where)
        return tree

    def learn(self, committed: Seq[int], target_row: Callable[[int], TokenDistribution] | None = None) -> None:
        """Teach the calibration: ``committed`` shows of all candidates, drafted or not, which would have been right.

        ``target_row(i)``: the target's distribution after i committed tokens. Then what is learned is how likely
        each candidate was, which varies less than whether it was drawn.
        """
        if self._calibration is None:
            return
        tokens = self._tokens if self._grown is None else self._grown.candidates
        node = ROOT
        for index, token in enumerate(committed):
            right = ROOT
            children = self._after(node)
            p = target_row(index) if target_row is not None and children else None
            for child in children:
                kind, drafted = self._kind(child), tokens[child]
                self._calibration.learn(kind, drafted == token if p is None else p[drafted])
                if drafted == token:
                    right = child
            if right == ROOT:
                return
            node = right

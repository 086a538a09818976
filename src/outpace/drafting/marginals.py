"""Drafts from marginals: what may stand at each position to come, whatever stands between.

A parallel drafter scores several positions in one forward, each without knowing what the others turn out to be. Such
rows make a chain (the likeliest token of each), a sampled chain (one draw from each: a row is the same whatever was
drawn before it, so it is every draw's true q), or a tree: of all prefixes that the candidates spell, the likeliest by
the product of their rates (DDTree's best-first heap, Ringel and Romano 2026, arXiv 2604.12989).

Ours, beside the paper: a candidate's rate is not its probability but the acceptance that candidates of its kind have
had, and the tree ends where its next token would cost more than it promises.

Subclass :class:`FromMarginals` and give the rows::

    class Mine(FromMarginals):
        def rows(self, sequences, depths):
            return [logits for each sequence]    # (n, words), row 0 of the token after the last committed one
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, takewhile
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.proposal import Proposal
from outpace.core.tree import ROOT, QRow, TokenTree
from outpace.core.tree_distribution import TreeDistribution, warp
from outpace.drafting.base import Drafter
from outpace.drafting.best_first import FLOOR, Grown
from outpace.drafting.calibration import Calibration, Kind
from outpace.drafting.namespaces import Namespaces
from outpace.targets.base import Sequence, TreeScores
from outpace.targets.top import top_and_totals

EDGE = 5
"""The largest certainty; e^5 : 1."""


class Level(NamedTuple):
    """Candidates for one position, likeliest first: ``tokens``, and ``logs``, the logarithms of their probabilities."""

    tokens: list[int]
    logs: list[float]


def certainty(log_q: float) -> int:
    """A probability's odds on a scale of whole numbers, from -EDGE to EDGE; 0 is even."""
    if log_q >= -1e-4:
        return EDGE
    odds = log_q - math.log(-math.expm1(log_q))
    return round(min(max(odds, -EDGE), EDGE))


def prior(kind: Any) -> float:
    """Before anything is known a drafter is right as often as it says. ``kind`` ends with a certainty."""
    return 1.0 / (1.0 + math.exp(-kind[-1]))


def marginal_prior(kind: Any) -> float:
    """The same for kinds of :func:`likeliest_prefixes`, whose rows do not know the path before them.

    A row that is sure is sure of the likeliest path: of another it is right far less often than it says.
    """
    _, _, strayed, odds = kind
    return prior((0.5 * odds - 0.5,)) if strayed and odds >= 0 else prior(kind)


def levels_of(logits: Tensor, words: Seq[int], k: int, temperature: float = 0.0) -> list[Level]:
    """The ``k`` likeliest words at each position: ``logits`` (n, Vd) over ``words``, the target's ids. n levels.

    Above temperature 0 the probabilities are those at that temperature.
    """
    inverse_temperature = 1.0 / temperature if temperature > 0.0 else 1.0
    return [
        Level([words[place] for place in places], [value * inverse_temperature - total for value in values])
        for values, places, total in top_and_totals(logits, k, inverse_temperature)
    ]


class _Choice(NamedTuple):
    rate: float
    token: int
    kind: Kind
    first: bool


def likeliest_prefixes(
    levels: Seq[Level], rate: Callable[[Kind], float], budget: Budget, floor: float = FLOOR
) -> Grown:
    """The likeliest prefixes that the candidates of ``levels`` spell, best first; with one candidate each, a chain.

    A candidate's kind is (depth, rank, whether its path has left the likeliest tokens before it, certainty), and
    ``rate`` says how often its kind is right; a path's estimate is the product. At most ``budget.nodes`` prefixes of
    ``budget.depth`` tokens, ``budget.width`` siblings each; what is less likely than ``floor`` is left out.
    """
    ranked: dict[tuple[int, bool], list[_Choice]] = {}

    def choices(depth: int, strayed: bool) -> list[_Choice]:
        found = ranked.get((depth, strayed))
        if found is None:
            level = levels[depth]
            kinds = [(depth, rank, strayed, certainty(log)) for rank, log in enumerate(level.logs)]
            found = [
                _Choice(rate(kind), token, kind, rank == 0)
                for rank, (kind, token) in enumerate(zip(kinds, level.tokens, strict=True))
            ]
            found.sort(key=lambda one: -one.rate)  # stable: of equals the likelier
            ranked[depth, strayed] = found[: budget.width]
            found = ranked[depth, strayed]
        return found

    tree, kinds = TokenTree(), list[Kind]()
    heap: list[tuple[float, int, int, float, int, bool, int]] = []
    order, deepest = 0, min(budget.depth, len(levels))

    def push(parent: int, before: float, depth: int, strayed: bool, index: int) -> None:
        nonlocal order
        if depth < deepest and index < len(options := choices(depth, strayed)):
            path_acceptance_prob = before * options[index].rate
            if path_acceptance_prob >= floor:
                order += 1  # of equals the earlier
                heapq.heappush(heap, (-path_acceptance_prob, order, parent, before, depth, strayed, index))

    push(ROOT, 1.0, 0, False, 0)
    while heap and len(tree) < budget.nodes:
        # Of a node's children only the likeliest waits in the heap, and is replaced by the next when it is taken.
        negative, _, parent, before, depth, strayed, index = heapq.heappop(heap)
        choice = choices(depth, strayed)[index]
        node = tree.add(parent, choice.token, path_acceptance_prob=-negative)
        kinds.append(choice.kind)
        push(parent, before, depth, strayed, index + 1)
        push(node, -negative, depth + 1, strayed or not choice.first, 0)
    return Grown(tree, kinds, 0)


def draw_chain(sequence: Sequence, logits: Tensor, ids: Tensor, length: int, chance: Chance) -> TokenTree:
    """A chain of ``length`` tokens, one drawn from each row of ``logits`` (n, Vd) as the request would sample it.

    Fewer where no token can follow. ``ids`` (Vd,): the words. Each draw's q is its row; where penalties or a grammar
    count, the row as they leave it after the draws before.
    """
    tree, sampler, ids = TokenTree(), sequence.sampler, ids.to(logits.device)
    if not sampler.params.path_dependent and not sampler.params.logit_bias:
        rows = warp(logits[:length].float(), sampler.params)
        for row in rows:
            tree.add(len(tree) - 1, int(ids[chance.categorical(row)]), QRow(row, ids))
        return tree
    wide = logits.new_full((length, sampler.vocab_size), -math.inf, dtype=torch.float32)
    wide[:, ids] = logits[:length].float()
    distribution = TreeDistribution(sampler, tree, wide)
    for node in range(ROOT, length - 1):
        if distribution.dead_end(node):
            break
        q = distribution.p(node)
        tree.add(node, chance.categorical(q), QRow(q))
    return tree


class FromMarginals(Drafter, ABC):
    """A drafter whose positions are scored independently of one another.

    ``words`` (Vd,): the target's id of each word. ``k``: candidates of a position, 1 for chains. ``sampled``: above
    temperature 0 it draws a chain; otherwise what it drafts is a function of the text at every temperature.
    """

    def __init__(self, words: Tensor, k: int = 1, *, sampled: bool = False) -> None:
        self.proposal = Proposal(tree=k > 1, sampled=sampled)
        self.k = k
        self.sampled = sampled
        self._ids = words
        self._words: list[int] = words.tolist()
        self._calibrations = Namespaces(lambda: Calibration(self.prior))
        self._grown: dict[Sequence, Grown] = {}

    def prior(self, kind: Any) -> float:
        """How often candidates of a kind (see :func:`likeliest_prefixes`) are right before anything was seen."""
        return marginal_prior(kind)

    @abstractmethod
    def rows(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Tensor | None]:
        """Float32 logits (n, Vd) for each sequence: row 0 of the token after the last committed one, and so on.

        At most ``depths[i]`` rows are read; None: nothing to draft from. One forward for all.
        """

    def begin(self, sequence: Sequence) -> None:
        self._calibrations.open(sequence)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = [TokenTree() for _ in sequences]
        wanted = []
        for index, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True)):
            self._grown.pop(sequence, None)
            if budget.depth > 0 and budget.nodes > 0 and budget.width > 0:
                wanted.append(index)
        if wanted:
            found = self.rows([sequences[index] for index in wanted], [budgets[index].depth for index in wanted])
            for index, logits in zip(wanted, found, strict=True):
                if logits is not None and len(logits):
                    trees[index] = self._tree(sequences[index], budgets[index], logits)
        return trees

    def _tree(self, sequence: Sequence, budget: Budget, logits: Tensor) -> TokenTree:
        params, calibration = sequence.params, self._calibrations[sequence]
        drawn = self.sampled and not params.greedy
        levels = levels_of(logits[: budget.depth], self._words, 1 if drawn else self.k, params.temperature)
        levels = list(takewhile(lambda level: math.exp(level.logs[0]) >= budget.confidence, levels))
        if drawn:
            return self._drawn(sequence, budget, logits, levels)
        tree, kinds, _ = likeliest_prefixes(levels, calibration.rate, budget)
        self._grown[sequence] = Grown(tree, kinds, len(sequence.tokens))
        count = budget.best_draft_size(tree.path_acceptance_probs)
        return tree if count == len(tree) else tree.first(count)

    def _drawn(self, sequence: Sequence, budget: Budget, logits: Tensor, levels: list[Level]) -> TokenTree:
        """How long the chain is follows from its rows, which know nothing of what will be drawn."""
        kinds: list[Kind] = [(depth, -1, False, certainty(level.logs[0])) for depth, level in enumerate(levels)]
        rates = [self._calibrations[sequence].rate(kind) for kind in kinds[: budget.nodes]]
        length = budget.best_draft_size(list(accumulate(rates, mul)))
        tree = draw_chain(sequence, logits, self._ids, length, self.chance(sequence))
        self._grown[sequence] = Grown(tree, kinds[: len(tree)], len(sequence.tokens))
        return tree

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence in sequences:
            grown = self._grown.pop(sequence, None)
            if grown is not None:
                self._calibrations[sequence].learn_tree(grown.tree, grown.kinds, sequence.tokens[grown.length :])

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """What was learned stays behind, or in the namespace."""
        self._calibrations.open(twin)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        self._grown.pop(sequence, None)

    def end(self, sequence: Sequence) -> None:
        self._grown.pop(sequence, None)
        self._calibrations.close(sequence)

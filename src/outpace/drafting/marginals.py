"""Drafts from marginals: the distribution of each of the next positions, whatever stands between.

A parallel drafter scores several positions in one forward, without knowing which tokens the others hold. Such rows
make a chain (the likeliest token of each), a sampled chain (one draw from each: a row does not depend on the draws
before it, so it is every draw's true q), or a tree: of all prefixes that the candidates spell, the likeliest by the
product of their rates (DDTree's best-first heap, Ringel and Romano 2026, arXiv 2604.12989).

Unlike the paper, a candidate's rate is not its probability but the acceptance that candidates of its kind have had,
and the tree ends where another token would cost more time than it saves.

Subclass :class:`FromMarginals` and give the rows::

    @dataclass(slots=True)
    class MyState(MarginalState):
        kv: Any = None

    class MyDrafter(FromMarginals[MyState]):
        def begin(self, sequence):
            return MyState(sequence, self.calibration_of(sequence), kv=...)

        def rows(self, states, depths):
            return [logits for each state]    # (n, Vd), row 0 of the token after the last committed one
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, takewhile
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.policy import RankedRow
from outpace.core.chance import Chance
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.tree import ROOT, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.base import Drafter
from outpace.drafting.best_first import FLOOR, CandidateState, Grown, Rated, Successor, grow
from outpace.drafting.calibration import Calibration, Kind
from outpace.drafting.draft_token import draft_token
from outpace.drafting.namespaces import Namespaces
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from torch import Tensor

EDGE = 5
"""The largest certainty: odds of e^5 to 1."""


class Level(NamedTuple):
    """Candidates for one position, likeliest first: ``tokens``, and ``logs``, the logarithms of their probabilities."""

    tokens: list[int]
    logs: list[float]


def certainty(log_q: float) -> int:
    """The logarithm of a probability's odds, rounded, from -EDGE to EDGE; 0 is even."""
    if log_q >= -1e-4:
        return EDGE
    odds = log_q - math.log(-math.expm1(log_q))
    return round(min(max(odds, -EDGE), EDGE))


def prior(kind: Any) -> float:
    """Before anything was observed, the acceptance rate is the draft probability. ``kind`` ends with a certainty."""
    return 1.0 / (1.0 + math.exp(-kind[-1]))


def marginal_prior(kind: Any) -> float:
    """The same for kinds of :func:`likeliest_prefixes`, whose rows do not know the path before them.

    A row with a high probability is right on the likeliest path; on another path it is right far less often.
    """
    _, _, strayed, odds = kind
    return prior((0.5 * odds - 0.5,)) if strayed and odds >= 0 else prior(kind)


def levels_of(logits: Tensor, ids: Seq[int], topk: int, temperature: float = 0.0) -> list[Level]:
    """The ``topk`` likeliest tokens at each position: ``logits`` (n, Vd) over ``ids``, the target's ids. n levels.

    Above temperature 0 the probabilities are those at that temperature.
    """
    from outpace.targets.top import top_and_totals

    inverse_temperature = 1.0 / temperature if temperature > 0.0 else 1.0
    return [
        Level([ids[place] for place in places], [value * inverse_temperature - total for value in values])
        for values, places, total in top_and_totals(logits, topk, inverse_temperature)
    ]


def likeliest_prefixes(
    levels: Seq[Level], rate: Callable[[Kind], float], budget: Budget, floor: float = FLOOR
) -> Grown:
    """The likeliest prefixes that the candidates of ``levels`` spell, best first; with one candidate each, a chain.

    A candidate's kind is (depth, rank, whether its path has left the likeliest tokens before it, certainty), and
    ``rate`` gives the acceptance rate of a kind; a path's acceptance probability is their product. At most
    ``budget.max_nodes`` prefixes of ``budget.depth`` tokens, ``budget.topk`` siblings each; what is less likely than
    ``floor`` is left out.
    """

    @cache
    def rated(place: tuple[int, bool]) -> Rated:
        depth, strayed = place
        if depth == len(levels):
            return ()
        found: list[tuple[float, Successor]] = []
        for rank, (token, log) in enumerate(zip(*levels[depth], strict=True)):
            kind = (depth, rank, strayed, certainty(log))
            found.append((rate(kind), Successor(token, kind, (depth + 1, strayed or rank > 0))))
        return sorted(found, key=lambda pair: -pair[0])[: budget.topk]

    return grow((0, False), rated, budget.depth, budget.max_nodes, floor)


def draw_chain(sequence: Sequence, logits: Tensor, ids: Tensor, length: int, chance: Chance) -> TokenTree:
    """A chain of ``length`` tokens, one drawn from each row of ``logits`` (n, Vd) as the request would sample it.

    Fewer where no token can follow. ``ids`` (Vd,): the target's ids of the draft vocabulary. Each draw's q is its row;
    with penalties or a grammar, the row after these were applied for the draws before it.
    """
    import torch

    tree, sampler, ids = TokenTree(), sequence.sampler, ids.to(logits.device)
    alike = not sampler.params.path_dependent and not sampler.params.logit_bias
    if alike and sequence.noise is None:  # shared noise belongs to the target's ids
        for q in sampler.open_rows(logits[:length].float(), range(min(length, len(logits))), sampler.params):
            if q is None:
                break
            tree.add(len(tree) - 1, int(ids[chance.categorical(q)]), QRow(q, ids))
        return tree
    wide = logits.new_full((length, sampler.vocab_size), -math.inf, dtype=torch.float32)
    wide[:, ids] = logits[:length].float()
    distribution = TreeDistribution(sampler, tree, wide)
    for node in range(ROOT, length - 1):
        if distribution.dead_end(node):
            break
        q = distribution.at(node)
        tree.add(node, draft_token(sequence, len(tree), q, chance), QRow(q))
    return tree


def _wanted(levels: Seq[Level], budget: Budget) -> list[Level]:
    """The first levels of a chain, as far as the budget's policy wants draws from them."""

    def wanted(depth: int) -> bool:
        row = RankedRow([math.exp(log) for log in levels[depth].logs])
        return budget.draws(depth - 1, depth - 2 if depth else None, depth + 1, row)

    return [levels[depth] for depth in takewhile(wanted, range(len(levels)))]


@dataclass(slots=True)
class MarginalState(CandidateState):
    """What :class:`FromMarginals` keeps of one request; subclasses add what their rows are made from."""


S = TypeVar("S", bound=MarginalState)


class FromMarginals(Drafter[S], ABC):
    """A drafter whose positions are scored independently of one another.

    ``ids`` (Vd,): the target's id of each token of the draft vocabulary. ``topk``: candidates of a position, 1 for
    chains. ``sampled``: above temperature 0 it draws a chain; otherwise its draft is deterministic at every
    temperature.

    A subclass's ``begin`` returns its own state, with ``self.calibration_of(sequence)`` in it.
    """

    weighs_costs = True

    def __init__(self, ids: Tensor, topk: int = 1, *, sampled: bool = False) -> None:
        self.proposal = Proposal(tree=topk > 1, sampled=sampled, shares_noise=sampled)
        self.topk = topk
        self.sampled = sampled
        self.asks_policy = topk == 1
        self._ids = ids
        self._id_list: list[int] = ids.tolist()
        self._calibrations = Namespaces(lambda: Calibration(self.prior))

    def prior(self, kind: Any) -> float:
        """The acceptance rate of a kind (see :func:`likeliest_prefixes`) before anything was observed."""
        return marginal_prior(kind)

    def calibration_of(self, sequence: Sequence) -> Calibration:
        """The rates of the request's namespace, for its state."""
        return self._calibrations.open(sequence)

    @abstractmethod
    def rows(self, states: Seq[S], depths: Seq[int]) -> list[Tensor | None]:
        """Float32 logits (n, Vd) for each sequence: row 0 of the token after the last committed one, and so on.

        At most ``depths[i]`` rows are read; None: nothing to draft from. One forward for all.
        """

    def propose_batch(self, states: Seq[S], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = [TokenTree() for _ in states]
        wanted = []
        for index, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            state.grown = None
            if budget.depth > 0 and budget.max_nodes > 0 and budget.topk > 0:
                wanted.append(index)
        if wanted:
            found = self.rows([states[index] for index in wanted], [budgets[index].depth for index in wanted])
            for index, logits in zip(wanted, found, strict=True):
                if logits is not None and len(logits):
                    trees[index] = self._tree(states[index], budgets[index], logits)
        return trees

    def _tree(self, state: S, budget: Budget, logits: Tensor) -> TokenTree:
        params = state.sequence.params
        drawn = self.sampled and not params.greedy
        levels = levels_of(logits[: budget.depth], self._id_list, 1 if drawn else self.topk, params.temperature)
        levels = list(takewhile(lambda level: math.exp(level.logs[0]) >= budget.confidence, levels))
        if budget.policy is not None:
            levels = _wanted(levels, budget)
        if drawn:
            return self._drawn(state, budget, logits, levels)
        return state.draft(likeliest_prefixes(levels, state.calibration.rate, budget), budget)

    def _drawn(self, state: S, budget: Budget, logits: Tensor, levels: list[Level]) -> TokenTree:
        """A chain of draws. Its length follows from the rows alone, which do not depend on what will be drawn."""
        kinds: list[Kind] = [(depth, -1, False, certainty(level.logs[0])) for depth, level in enumerate(levels)]
        rates = [state.calibration.rate(kind) for kind in kinds[: budget.max_nodes]]
        length = budget.best_draft_size(list(accumulate(rates, mul)))
        tree = draw_chain(state.sequence, logits, self._ids, length, self.chance(state.sequence))
        state.grown = Grown(tree, kinds[: len(tree)])
        return tree

    def observe(self, state: S, verdict: Verdict) -> None:
        state.learn(verdict)

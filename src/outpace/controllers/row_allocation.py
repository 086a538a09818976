"""Which draft tokens of a batch are scored: the rows of one forward, shared out by marginal yield.

Requests that decode together share their forwards. So a draft token is not worth a row because it would gain for its
request alone, but because the batch commits more tokens per time with it: the likeliest draft tokens of all requests
come first, and there are as many as raise the expected tokens of the whole round per time. A request whose draft tokens
are unlikely gets no row while another one gets several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from functools import lru_cache
from itertools import islice
from typing import NamedTuple


class Allotment(NamedTuple):
    """``counts[i]``: how many of request i's candidates are drafted, its likeliest ones. ``tokens`` that the round is
    expected to commit, in ``cost``."""

    counts: tuple[int, ...]
    tokens: float
    cost: float

    @property
    def rate(self) -> float:
        """Expected tokens per time."""
        return self.tokens / self.cost


def allot(
    candidates: Seq[Seq[float]], costs: Seq[float], base_tokens: float, *, taken: int = 0, spent: float = 0.0
) -> Allotment:
    """The candidates that give the batch the most expected tokens per time; of equal rates the fewest.

    ``candidates[i]``: request i's path acceptance probabilities in descending order, parents before children: so the
    first n of a request are a tree for every n. ``costs[n]``: of a round with n draft tokens in all; no more rows than
    it has costs for are allotted. ``base_tokens``: expected without any of the candidates. ``taken``: draft tokens that
    are scored in any case. ``spent``: what drafting has cost already, in the unit of ``costs``.
    """
    last = len(costs) - 1
    taken = min(taken, last)
    if not any(candidates):
        return Allotment((0,) * len(candidates), base_tokens, costs[taken] + spent)
    ranked = sorted((-prob, at, request) for request, probs in enumerate(candidates) for at, prob in enumerate(probs))
    best, tokens = best_count((-prob for prob, _, _ in ranked), costs, base_tokens, taken=taken, spent=spent)
    counts = [0] * len(candidates)
    for _, _, request in ranked[:best]:
        counts[request] += 1
    return Allotment(tuple(counts), tokens, costs[taken + best] + spent)


def best_count(
    probs: Iterable[float], costs: Seq[float], base_tokens: float, *, taken: int = 0, spent: float = 0.0
) -> tuple[int, float]:
    """How many of ``probs``, in their order, give the most expected tokens per time, of equal rates the fewest; and
    the expected tokens. The rest as for :func:`allot`; there must be costs for ``taken``."""
    best, tokens, expected = 0, base_tokens, base_tokens
    most_rate = base_tokens / (costs[taken] + spent)
    for count, prob in enumerate(islice(probs, len(costs) - 1 - taken), start=1):
        expected += prob
        rate = expected / (costs[taken + count] + spent)
        if rate > most_rate:
            best, most_rate, tokens = count, rate, expected
    return best, tokens


def mean_costs(costs: Seq[tuple[float, ...]]) -> tuple[float, ...]:
    """The relative costs of a round of requests whose own differ, as their contexts do; as far as all are known."""
    first = costs[0]
    for one in costs:
        if one is not first:
            return _mean(tuple(costs))
    return first


@lru_cache(maxsize=256)
def _mean(costs: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    return tuple(sum(column) / len(costs) for column in zip(*costs, strict=False))


@lru_cache(maxsize=256)
def raised(costs: tuple[float, ...], steps: float) -> tuple[float, ...]:
    """Costs of rounds in which a draft has already taken ``steps``."""
    return tuple(cost + steps for cost in costs)


@lru_cache(maxsize=256)
def most_rate(costs: tuple[float, ...], base_tokens: float) -> float:
    """Tokens per time of the best round, if all draft tokens are accepted."""
    return max((base_tokens + count) / cost for count, cost in enumerate(costs))

"""Which draft tokens of a batch are scored: the rows of one forward, shared out by marginal yield.

Requests that decode together share their forwards. So a draft token is not worth a row because it would gain for its
request alone, but because the batch commits more tokens per time with it: the likeliest draft tokens of all requests
come first, and there are as many as raise the expected tokens of the whole round per time. A request whose draft tokens
are unlikely gets no row while another one gets several.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

from outpace.controllers.predictor import Forecast, best_count


def allot(
    candidates: Seq[Seq[float]], costs: Seq[float], base_tokens: float, *, taken: int = 0, spent: float = 0.0
) -> tuple[tuple[int, ...], Forecast]:
    """The candidates that give the batch the most expected tokens per time (:func:`best_count`, which has the rest):
    how many of each request's, its likeliest ones; and the round of all requests with them.

    ``candidates[i]``: request i's path acceptance probabilities in descending order, parents before children: so the
    first n of a request are a tree for every n.
    """
    last = len(costs) - 1
    taken = min(taken, last)
    if not any(candidates):
        return (0,) * len(candidates), Forecast(base_tokens, costs[taken] + spent)
    if len(candidates) == 1:  # which come in their order
        count, forecast = best_count(candidates[0], costs, base_tokens, taken=taken, spent=spent)
        return (count,), forecast
    ranked = sorted((-prob, at, request) for request, probs in enumerate(candidates) for at, prob in enumerate(probs))
    best, forecast = best_count((-prob for prob, _, _ in ranked), costs, base_tokens, taken=taken, spent=spent)
    counts = [0] * len(candidates)
    for _, _, request in ranked[:best]:
        counts[request] += 1
    return tuple(counts), forecast


def with_uncertain(
    certain: Seq[float], uncertain: Seq[tuple[float, float]], costs: Seq[float], base_tokens: float, spent: float
) -> Forecast:
    """The round with the most expected tokens per time where a part of the draft is yet to be made.

    ``certain``: path acceptance probabilities of draft tokens that there are; ``uncertain``: of ones that a drafter may
    propose, each with the share of its drafts that have it. A token that seldom comes takes that share of a row, so its
    probability, which counts the drafts without it as 0, is not set against the whole row.
    """
    ranked = [(prob, 1.0, prob) for prob in certain]
    ranked += [(prob / share, share, prob) for prob, share in uncertain if prob > 0.0]
    ranked.sort(reverse=True)
    rows, tokens, last = 0.0, base_tokens, len(costs) - 1
    best_tokens, best_cost = base_tokens, costs[0] + spent
    for _, share, prob in ranked:
        rows += share
        tokens += prob
        if rows > last:
            break
        whole = int(rows)
        cost = costs[whole] + (rows - whole) * (costs[min(whole + 1, last)] - costs[whole]) + spent
        if tokens * best_cost > best_tokens * cost:
            best_tokens, best_cost = tokens, cost
    return Forecast(best_tokens, best_cost)


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

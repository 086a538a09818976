"""For which requests of a round to ask a learned drafter: the decision of ``auto``.

All options are compared by one measure: the expected tokens of the whole round, beyond those that its expected time,
the draft's included, would give at the pace of the request. The best round by itself is not part of the best decoding:
where copies will soon commit several tokens a round, a draft that barely beats one autoregressive round loses time.
What the free drafter adds is known before anything is decided: its draft tokens state how likely they are. What the
learned one would add is an estimate (:mod:`outpace.controllers.yields`). With these, and with what rows and drafts
cost, :func:`plan` chooses the requests that it is asked for: all, some or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import NamedTuple

from outpace.controllers.predictor import Forecast
from outpace.controllers.row_allocation import allot, with_uncertain

MARGIN = 1.03
"""How much more tokens than its time gives otherwise a round with the learned drafter must be expected to commit:
estimates are not exact."""


def after_toll(offer: list[float], toll: float) -> list[float]:
    """What is left of an offer where each draft bears ``toll`` tokens of what had to be done before the first."""
    gain = sum(offer)
    if gain <= toll:
        return []
    return [(1.0 - toll / gain) * prob for prob in offer] if toll else offer


class Plan(NamedTuple):
    """``asked``: the requests that the learned drafter is asked for. ``alone``: the round with the free drafter alone,
    which then has ``counts[i]`` draft tokens for request i; ``best``: the round as planned, of which ``drafting`` is
    the time of the learned draft."""

    asked: tuple[int, ...]
    counts: tuple[int, ...]
    alone: Forecast
    best: Forecast
    drafting: float = 0.0


def plan(
    free: Seq[Seq[float]],
    learned: Seq[Seq[float]],
    costs: Seq[float],
    base_tokens: float,
    drafting: Callable[[int], float],
    shares: Seq[Seq[float]] = (),
    pace: float | None = None,
) -> Plan:
    """For which requests of a batch to ask the learned drafter: those with which the batch commits most per time.

    ``free[i]``, ``learned[i]``: path acceptance probabilities, in descending order, of what the free drafter has
    drafted for request i and of what the learned one is expected to add; empty where it cannot be asked. ``costs[n]``:
    of a round with n draft tokens; ``drafting(k)``: of a learned draft for k requests, in the same unit.
    ``shares[i]``: how many drafts of the learned one have each of ``learned[i]``; all, where nothing is given.
    ``pace``: tokens per autoregressive step that decoding gives at present; by default what this round gives without
    the learned drafter.
    """
    counts, alone = allot(free, costs, base_tokens)
    best = alone
    # At a known pace there is no margin: rounds without drafts take longer than their rows, too.
    usual, margin = (alone.speedup, MARGIN) if pace is None else (pace, 1.0)

    def worth(one: Forecast) -> float:
        """Tokens beyond what its time would give otherwise. Of rounds that follow one another, those decode fastest
        that have most of it (average reward of a semi-Markov decision process)."""
        return one.tokens - usual * one.steps

    limit = worth(alone)
    asked: tuple[int, ...] = ()
    spent = 0.0
    gains = {at: sum(probs) for at, probs in enumerate(learned) if probs}
    order = sorted(gains, key=lambda at: -gains[at])
    size, least = 1, MARGIN * alone.speedup
    offered = {at: _with_shares(learned[at], shares[at] if shares else ()) for at in order}
    if len(order) > 1:  # in most rounds of a batch this shows that nobody is asked
        offers = [prob for probs in free for prob in probs]
        offers += [prob / share for at in order for prob, share in offered[at]]
        slack = 1.0 - 1e-9  # for sums in another order
        if not _may_gain(offers, costs, base_tokens, drafting(1), slack * least):
            return Plan((), counts, alone, best)
    while order:
        size = min(size, len(order))
        cost = drafting(size)
        # Even if rows cost nothing; a larger draft never takes less time.
        if alone.tokens + sum(gains.values()) - margin * usual * (costs[0] + cost) <= limit:
            break
        members = order[:size]
        drafts = [one for at in members for one in offered[at]]
        found = with_uncertain([prob for probs in free for prob in probs], drafts, costs, base_tokens, cost)
        if found.tokens - margin * usual * found.steps > limit and worth(found) > worth(best):
            asked, best, spent = tuple(sorted(members)), found, cost
        if size == len(order):
            break
        size *= 2
    return Plan(asked, counts, alone, best, spent)


def _may_gain(offers: Seq[float], costs: Seq[float], base_tokens: float, drafting: float, least: float) -> bool:
    """Whether a round with a learned draft may reach the rate ``least``, by a bound that takes little time.

    ``offers``: how likely all draft tokens are accepted; ``drafting``: what the smallest draft takes.
    """
    total, likeliest = sum(offers), max(offers)
    for count, cost in enumerate(costs):
        if count * likeliest >= total:
            return base_tokens + total > least * (min(costs[count:]) + drafting)
        if base_tokens + count * likeliest > least * (cost + drafting):
            return True
    return False


def _with_shares(probs: Seq[float], shares: Seq[float]) -> list[tuple[float, float]]:
    """Each probability with how often its token comes, which is never less often than it is accepted."""
    return [(prob, max(prob, shares[at]) if at < len(shares) else 1.0) for at, prob in enumerate(probs)]

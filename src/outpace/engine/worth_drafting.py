"""Whether a round drafts at all: what rounds of several requests have shown of it in this process."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any
from weakref import WeakKeyDictionary

from outpace.controllers.payoff import Payoff
from outpace.drafting.base import Drafter
from outpace.engine.request import Generation
from outpace.targets.base import Target

_KNOWN: WeakKeyDictionary[Drafter[Any], dict[int, Payoff | None]] = WeakKeyDictionary()
"""By the number of requests, nearly: rounds of five to eight are compared with each other."""


def payoff_of(target: Target, active: Seq[Generation]) -> Payoff | None:
    """What is known of rounds like this one; None where drafts do not depend on it: of one request, of fixed lengths or
    costs, of several drafters, and where an answer must repeat for its seed.

    It is asked in every round, before anything else is done for drafts.
    """
    count = len(active)
    if count < 2 or target.costs.fixed:
        return None
    drafter = active[0].drafter
    for one in active:
        if one.drafter is not drafter or not one.sequence.timed:
            return None
    size = count if count <= 4 else 4 + (count - 1).bit_length()
    known = _KNOWN.setdefault(drafter, {})
    if size not in known:
        nearest = min(known, key=lambda other: abs(other - size), default=None)
        known[size] = Payoff(None if nearest is None else known[nearest]) if _adapts(active) else None
    return known[size]


def _adapts(active: Seq[Generation]) -> bool:
    """Whether the drafter's lengths follow costs that the requests of a round share. A drafter has one controller."""
    one = active[0]
    budget = one.request.method.controller.budget(one.metrics, len(active), not one.sequence.timed)
    return budget.base_tokens > 1.0 and bool(budget.relative_costs)


def forget(drafter: Drafter[Any]) -> None:
    """Its next rounds begin as if none had been compared."""
    _KNOWN.pop(drafter, None)

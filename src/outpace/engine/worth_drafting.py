"""Whether a round drafts at all: what rounds of several requests have shown of it in this process."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any
from weakref import WeakKeyDictionary

from outpace.controllers.base import Budget
from outpace.controllers.payoff import Payoff
from outpace.drafting.base import Drafter
from outpace.engine.request import Generation
from outpace.targets.base import Target

_KNOWN: WeakKeyDictionary[Drafter[Any], dict[int, Payoff]] = WeakKeyDictionary()
"""By the number of requests, nearly: rounds of five to eight are compared with each other."""


def payoff_of(target: Target, active: Seq[Generation], budgets: Seq[Budget]) -> Payoff | None:
    """What is known of rounds like this one; None where drafts do not depend on it: of one request, of fixed lengths or
    costs, of several drafters, and where an answer must repeat for its seed."""
    if len(active) < 2 or target.costs.fixed:
        return None
    drafter = active[0].drafter
    for one, budget in zip(active, budgets, strict=True):
        shared = budget.base_tokens > 1.0 and bool(budget.relative_costs)
        if one.drafter is not drafter or not shared or not _may_vary(one):
            return None
    size = len(active) if len(active) <= 4 else 4 + (len(active) - 1).bit_length()
    return _KNOWN.setdefault(drafter, {}).setdefault(size, Payoff())


def _may_vary(one: Generation) -> bool:
    return one.request.params.greedy or not one.request.repeats

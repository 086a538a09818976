"""Whether a round drafts at all: what rounds of several requests have shown of it in this process."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any
from weakref import WeakKeyDictionary

from outpace.controllers.payoff import Payoff
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.engine.request import Generation
from outpace.targets.base import Target

_KNOWN: WeakKeyDictionary[Drafter[Any], dict[int, Payoff | None]] = WeakKeyDictionary()
"""By the number of requests, nearly: rounds of five to eight are compared with each other."""


def payoff_of(target: Target, active: Seq[Generation]) -> Payoff | None:
    """What is known of rounds like this one; None where drafts do not depend on it: of one request, of fixed lengths or
    costs, of several drafters, and where an answer must repeat: for its seed, or greedily under a lossy rule.

    It is asked in every round, before anything else is done for drafts.
    """
    count = len(active)
    if count < 2 or target.costs.fixed:
        return None
    drafter = active[0].drafter
    for one in active:
        if one.drafter is not drafter or not one.sequence.timed:
            return None
        if one.sequence.params.greedy and (one.request.method.departs or not one.rule.lossless):
            return None  # what it drafts decides what it answers
    size = count if count <= 4 else 4 + (count - 1).bit_length()
    known = _KNOWN.setdefault(drafter, {})
    if size not in known:
        known[size] = Payoff(_like(known, size)) if _adapts(active) else None
    return known[size]


def _like(known: dict[int, Payoff | None], size: int) -> Payoff | None:
    """The batch whose answer one of this size begins with. Drafts pay less the more requests share a round, so what
    a larger batch found against them says nothing of a smaller one."""
    nearest = min(known, key=lambda other: abs(other - size), default=size)
    found = known.get(nearest)
    return None if found is None or (nearest > size and not found.better) else found


def _adapts(active: Seq[Generation]) -> bool:
    """Whether the drafter's lengths follow costs, so that it may do without drafts. A drafter has one controller."""
    one = active[0]
    if one.request.method.controller.adapts:
        return True
    budget = one.request.method.controller.budget(one.metrics, len(active), not one.sequence.timed)
    return budget.base_tokens > 1.0 and bool(budget.relative_costs)


def expected_steps(target: Target, active: Seq[Generation], trees: Seq[TokenTree]) -> float:
    """Autoregressive steps that the round takes beside its draft, by the target's costs."""
    rows = [1 + len(tree) + len(tree.auxiliary_tokens) for tree in trees]
    if sum(rows) == len(rows):
        return 1.0
    contexts = [len(one.sequence.tokens) for one in active]
    beside = target.costs.overhead
    plain = target.costs.forward([1] * len(rows), contexts)
    return (target.costs.forward(rows, contexts) + beside) / (plain + beside)


def forget(drafter: Drafter[Any]) -> None:
    """Its next rounds begin as if none had been compared."""
    _KNOWN.pop(drafter, None)

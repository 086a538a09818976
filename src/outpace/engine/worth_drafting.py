"""Whether a round drafts at all: what rounds of several requests have shown of it.

Rounds of this process show it, by what they take. An answer that must repeat may not depend on a clock, nor on what
others did before: such requests go by the rounds since their own batch began, and by what costs expect of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any
from weakref import WeakKeyDictionary

from outpace.controllers.payoff import Payoff
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.engine.request import Generation
from outpace.targets.base import Target

ASKING = 1e-4
"""Seconds, for each request, that a round takes to ask for drafts, whether there are any or not. Counted where no clock
may be read."""
_KNOWN: WeakKeyDictionary[Drafter[Any], dict[int, Payoff | None]] = WeakKeyDictionary()
"""By the number of requests, nearly: rounds of five to eight are compared with each other."""


def payoff_of(target: Target, active: Seq[Generation]) -> Payoff | None:
    """What is known of rounds like this one; None where drafts do not depend on it: of one request, of fixed lengths or
    costs, and of several drafters.

    It is asked in every round, before anything else is done for drafts.
    """
    count, timed = len(active), by_clock(active)
    if timed:
        for one in active:
            one.payoffs = None  # of a batch that has ended
    if count < 2 or target.costs.fixed:
        return None
    drafter = active[0].drafter
    for one in active:
        if one.drafter is not drafter:
            return None
    known = _KNOWN.setdefault(drafter, {}) if timed else _since_their_batch_began(active)
    size = count if count <= 4 else 4 + (count - 1).bit_length()
    if size not in known:
        known[size] = Payoff(_like(known, size), clocked=timed) if _adapts(active, timed=timed) else None
    return known[size]


def by_clock(active: Seq[Generation]) -> bool:
    """Whether the drafts of a round may depend on what rounds take: not where one of its answers must repeat."""
    return all(one.sequence.timed for one in active)


def _since_their_batch_began(active: Seq[Generation]) -> dict[int, Payoff | None]:
    """What these requests know together; those that join go by what the others know."""
    known = next((one.payoffs for one in active if one.payoffs is not None), None)
    if known is None:
        known = {}
    for one in active:
        one.payoffs = known
    return known


def _like(known: dict[int, Payoff | None], size: int) -> Payoff | None:
    """The batch whose answer one of this size begins with. Drafts pay less the more requests share a round, so what
    a larger batch found against them says nothing of a smaller one."""
    nearest = min(known, key=lambda other: abs(other - size), default=size)
    found = known.get(nearest)
    return None if found is None or (nearest > size and not found.better) else found


def _adapts(active: Seq[Generation], *, timed: bool) -> bool:
    """Whether the drafter's lengths follow costs, so that it may do without drafts, and what its drafts take is known.
    A drafter has one controller."""
    one = active[0]
    if timed and one.request.method.controller.adapts:
        return True
    budget = one.request.method.controller.budget(one.metrics, len(active), not timed)
    return budget.base_tokens > 1.0 and bool(budget.relative_costs) and (timed or one.drafter.states_draft_steps)


def expected_steps(target: Target, active: Seq[Generation], trees: Seq[TokenTree]) -> float:
    """Autoregressive steps that the round takes beside its draft, by the target's costs."""
    rows = [1 + len(tree) + len(tree.auxiliary_tokens) for tree in trees]
    if sum(rows) == len(rows):
        return 1.0
    contexts = [len(one.sequence.tokens) for one in active]
    beside = target.costs.overhead
    return (target.costs.forward(rows, contexts) + beside) / _plain(target, active)


def asking_steps(target: Target, active: Seq[Generation]) -> float:
    """Autoregressive steps that the drafts of the round under way take, where no clock may be read."""
    drafter = active[0].drafter
    return ASKING * len(active) / _plain(target, active) + drafter.draft_steps([one.draft_state for one in active])


def _plain(target: Target, active: Seq[Generation]) -> float:
    """Seconds of the round without drafts."""
    return target.costs.forward([1] * len(active), [len(one.sequence.tokens) for one in active]) + target.costs.overhead


def forget(drafter: Drafter[Any]) -> None:
    """Its next rounds begin as if none had been compared."""
    _KNOWN.pop(drafter, None)

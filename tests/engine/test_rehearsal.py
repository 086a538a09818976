"""A rehearsal times drafts alone, in a few rounds, and fewer where they are long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.engine import rehearsal
from outpace.engine.rehearsal import draft_seconds
from outpace.targets.base import Scores, Sequence
from outpace.targets.table import TableTarget


class Counting(Drafter[DraftState]):
    """Chains of two tokens; counts drafts, and requests that have ended."""

    proposal = Proposal(tree=True)

    def __init__(self, spend: Callable[[], None] = lambda: None) -> None:
        self.drafts, self.ended, self._spend = 0, 0, spend

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        self.drafts += 1
        self._spend()
        return TokenTree.chain([1, 2][: budget.depth])

    def end(self, state: DraftState) -> None:
        self.ended += 1


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_no_draft_is_verified(count: int, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = TableTarget(8, context_length=400), Counting()
    scored: list[int] = []
    score = target.score

    def watched(batch: Any, *rest: Any, **named: Any) -> Scores:
        scored.extend(len(tree) for _, tree in batch)
        return score(batch, *rest, **named)

    monkeypatch.setattr(target, "score", watched)
    assert draft_seconds(target, drafter, Fixed(4), count, sampled=sampled) > 0.0
    assert drafter.drafts == 16 * count
    assert drafter.ended == count
    assert set(scored) == {0}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.01, 16), (0.1, 11), (5.0, 8)])
def test_long_rounds_are_fewer(seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def spend() -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(rehearsal, "perf_counter", lambda: now)
    drafter = Counting(spend)
    draft_seconds(TableTarget(8, context_length=400), drafter, Fixed(4))
    assert drafter.drafts == rounds

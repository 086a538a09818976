"""What a level of a draft takes, as drafters are told it: of greedy and sampled requests, by a clock or without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outpace.heads.level_cost import LEVEL_COST, LevelCost
from outpace.targets.costs import FixedCosts, ForwardCosts
from outpace.targets.table import TableTarget, random_table

ROUND = 2e-3


class Costs(ForwardCosts):
    """Rounds of two milliseconds a request as recorded, of four in this process."""

    overhead = 0.0

    def round_seconds(
        self, rows: int, context: int = 0, *, batch: int = 1, live: bool = False, sampled: bool = False
    ) -> float:
        return (2 * ROUND if live else ROUND) * batch


@pytest.fixture
def target() -> TableTarget:
    found = TableTarget(5, random_table(5, 1))
    found.__dict__["costs"] = Costs(found)
    return found


def level(target: TableTarget, rehearsed: Callable[[LevelCost], None] = lambda _: None) -> LevelCost:
    found = LevelCost(target, "level", lambda: rehearsed(found))
    return found


def of(cost: LevelCost, *, live: bool, sampled: bool, drafting: int = 1, batch: int | None = None) -> float:
    return cost.of(drafting, batch or drafting, 16, live=live, sampled=sampled)


def settled(cost: LevelCost, seconds: float, *, sampled: bool) -> None:
    for _ in range(50):
        cost.measured([seconds], sampled=sampled)


def test_greedy_and_sampled_levels_are_timed_apart_and_beside_rounds_of_now(target: TableTarget) -> None:
    cost = level(target)
    assert of(cost, live=True, sampled=False) == of(cost, live=True, sampled=True) == LEVEL_COST  # nothing was timed
    settled(cost, 2e-4, sampled=False)
    settled(cost, 4e-4, sampled=True)
    assert of(cost, live=True, sampled=False) == pytest.approx(2e-4 / (2 * ROUND))
    assert of(cost, live=True, sampled=True) == pytest.approx(4e-4 / (2 * ROUND))
    assert of(cost, live=True, sampled=False, drafting=4) == pytest.approx(2e-4 / (8 * ROUND) / 4)  # each its share
    # Of a round of eight, in which two draft.
    assert of(cost, live=True, sampled=False, drafting=2, batch=8) == pytest.approx(2e-4 / (16 * ROUND) / 2)


def test_an_answer_that_must_repeat_goes_by_one_rehearsal_whatever_levels_take_now(target: TableTarget) -> None:
    asked = []

    def rehearsed(cost: LevelCost) -> None:
        asked.append(of(cost, live=False, sampled=True))
        cost.measured([3e-4], sampled=True)

    cost = level(target, rehearsed)
    settled(cost, 9e-4, sampled=True)
    first = of(cost, live=False, sampled=True)
    assert first == pytest.approx(3e-4 / ROUND)
    settled(cost, 8e-4, sampled=True)
    assert of(cost, live=False, sampled=True) == of(cost, live=False, sampled=False) == first
    assert asked == [LEVEL_COST]
    assert of(cost, live=True, sampled=True) == pytest.approx(8e-4 / (2 * ROUND), rel=0.01)


def test_a_level_that_was_interrupted_hardly_counts(target: TableTarget) -> None:
    cost = level(target)
    settled(cost, 2e-4, sampled=False)
    before = of(cost, live=True, sampled=False)
    cost.measured([1.0], sampled=False)
    assert of(cost, live=True, sampled=False) <= 1.1001 * before


def test_levels_that_seemed_slow_at_first_are_run_again(target: TableTarget) -> None:
    """Where their price keeps drafts from running any, nothing would ever show that they are quick."""
    cost = level(target)
    cost.measured([1.0, 2e-4], sampled=True)  # the first one of a process
    assert of(cost, live=True, sampled=True) == LEVEL_COST
    cost.measured([3e-4], sampled=True)
    assert of(cost, live=True, sampled=True) == pytest.approx(3e-4 / (2 * ROUND))
    cost = level(target)
    cost.measured([2e-4, 8e-3, 8e-3], sampled=True)
    drafts = 0
    while of(cost, live=True, sampled=True) > 0.1:
        cost.measured([], sampled=True)
        drafts += 1
    assert 50 < drafts < 1000
    for _ in range(5000):  # text for which no level is run at any price
        cost.measured([], sampled=True)
    assert of(cost, live=True, sampled=True) == pytest.approx(1e-4 / (2 * ROUND))


def test_where_costs_are_fixed_no_clock_is_read(target: TableTarget) -> None:
    target.__dict__["costs"] = FixedCosts()
    cost = level(target)
    settled(cost, 5e-4, sampled=False)
    assert of(cost, live=True, sampled=False) == of(cost, live=True, sampled=False, drafting=8) == LEVEL_COST

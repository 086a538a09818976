"""What a level of a draft takes, as drafters are told it: of greedy and sampled requests, by a clock or without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outpace.core.sampling import SamplingParams
from outpace.heads.feature_drafter import LEVEL_COST, LevelCost
from outpace.targets.base import Sequence
from outpace.targets.costs import FixedCosts, ForwardCosts
from outpace.targets.table import TableTarget, random_table

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=3)
ROUND = 2e-3


class Costs(ForwardCosts):
    """Rounds of two milliseconds as recorded, of four in this process."""

    overhead = 0.0

    def even(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return ROUND

    def round_seconds(
        self, rows: int, context: int = 0, *, batch: int = 1, live: bool = False, sampled: bool = False
    ) -> float:
        return 2 * ROUND if live else ROUND


@pytest.fixture
def target() -> TableTarget:
    found = TableTarget(5, random_table(5, 1))
    found.__dict__["costs"] = Costs(found)
    return found


def sequence_of(target: TableTarget, params: SamplingParams, *, repeats: bool = True) -> Sequence:
    sequence = target.sequence([1, 2, 3], params)
    sequence.repeats = repeats
    return sequence


def level(target: TableTarget, rehearsed: Callable[[LevelCost], None] = lambda _: None) -> LevelCost:
    found = LevelCost(target, "level", lambda: rehearsed(found))
    return found


def test_greedy_and_sampled_levels_are_timed_apart_and_beside_rounds_of_now(target: TableTarget) -> None:
    cost = level(target)
    greedy, free = sequence_of(target, GREEDY), sequence_of(target, SAMPLED, repeats=False)
    assert cost.of(greedy, 1) == cost.of(free, 1) == LEVEL_COST  # nothing was timed
    for _ in range(50):
        cost.measured(2e-4, sampled=False)
        cost.measured(4e-4, sampled=True)
    assert cost.of(greedy, 1) == pytest.approx(2e-4 / (2 * ROUND))
    assert cost.of(free, 1) == pytest.approx(4e-4 / (2 * ROUND))
    assert cost.of(greedy, 4) == pytest.approx(2e-4 / (2 * ROUND) / 4)  # each bears its share


def test_an_answer_that_must_repeat_goes_by_one_rehearsal_whatever_levels_take_now(target: TableTarget) -> None:
    asked = []

    def rehearsed(cost: LevelCost) -> None:
        asked.append(cost.of(sequence_of(target, SAMPLED), 1))
        cost.measured(3e-4, sampled=True)

    cost, seeded = level(target, rehearsed), sequence_of(target, SAMPLED)
    cost.measured(9e-4, sampled=True)
    first = cost.of(seeded, 1)
    assert first == pytest.approx(3e-4 / ROUND)
    for _ in range(20):
        cost.measured(9e-4, sampled=True)
    assert cost.of(seeded, 1) == first
    assert asked == [LEVEL_COST]
    assert cost.of(sequence_of(target, SAMPLED, repeats=False), 1) == pytest.approx(9e-4 / (2 * ROUND))


def test_a_level_that_was_interrupted_hardly_counts(target: TableTarget) -> None:
    cost, greedy = level(target), sequence_of(target, GREEDY)
    for _ in range(30):
        cost.measured(2e-4, sampled=False)
    before = cost.of(greedy, 1)
    cost.measured(1.0, sampled=False)
    assert cost.of(greedy, 1) <= 1.1001 * before


def test_where_costs_are_fixed_no_clock_is_read(target: TableTarget) -> None:
    target.__dict__["costs"] = FixedCosts()
    cost = level(target)
    cost.measured(5e-4, sampled=False)
    assert cost.of(sequence_of(target, GREEDY), 1) == cost.of(sequence_of(target, GREEDY), 8) == LEVEL_COST

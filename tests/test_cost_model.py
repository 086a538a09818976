"""The cost model and the measured costs it goes by."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outpace.controllers.cost_model import CostModel
from outpace.metrics import RequestMetrics
from outpace.targets.costs import ForwardCosts
from outpace.targets.table import TableTarget


class Given(ForwardCosts):
    """Costs by formula, and a record of what was asked."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        super().__init__(TableTarget(7))
        self._cost = cost
        self.measured: list[int] = []

    def _measure(self, rows: int) -> float:
        self.measured.append(rows)
        return self._cost(rows)


def after(accepted: int, drafted: int, rounds: int) -> RequestMetrics:
    metrics = RequestMetrics()
    for _ in range(rounds):
        metrics.count_round(drafted, accepted, accepted + 1)
    return metrics


def flat(rows: int) -> float:
    return 1.0


def proportional(rows: int) -> float:
    return float(rows)


def test_costs_are_measured_at_powers_of_two_once_and_joined_by_lines() -> None:
    costs = Given(lambda rows: 10.0 + rows)
    assert [costs.seconds(rows) for rows in (1, 3, 4, 6, 6)] == [11.0, 13.0, 14.0, 16.0, 16.0]
    assert sorted(costs.measured) == [1, 2, 4, 8]
    assert costs.seconds(1024) == 2 * costs.seconds(512)


def test_more_rows_never_cost_less_however_noisy_the_clock() -> None:
    noise = {1: 5.0, 2: 3.0, 4: 9.0, 8: 4.0}
    costs = Given(lambda rows: noise[rows])
    assert [costs.seconds(rows) for rows in (1, 2, 4, 8)] == [5.0, 5.0, 9.0, 9.0]


def test_real_forwards_are_measured_without_leaving_a_trace() -> None:
    target = TableTarget(5, context_length=12)  # a vocabulary and a context smaller than what is measured
    assert target.costs.seconds(48) >= target.costs.seconds(1) > 0
    assert target.costs is target.costs


def test_free_rows_are_all_taken_and_dear_ones_none() -> None:
    metrics = after(accepted=3, drafted=4, rounds=5)
    assert CostModel(Given(flat), 5, most=9).budget(metrics, 1).depth == 9
    assert CostModel(Given(proportional), 5).budget(metrics, 1).depth == 0


def test_the_length_is_the_best_of_the_formula() -> None:
    costs = Given(lambda rows: 4.0 + 0.5 * rows)
    metrics = after(accepted=2, drafted=4, rounds=30)
    rate = round(metrics.recent_acceptance, 2)
    paces = [sum(rate**i for i in range(k + 1)) / costs.seconds(1 + k) for k in range(16)]
    assert CostModel(costs, 5).budget(metrics, 1).depth == paces.index(max(paces)) > 0


def test_a_full_batch_is_not_drafted_for_and_a_small_one_is() -> None:
    costs = Given(lambda rows: max(1.0, rows / 32))  # free up to 32 rows, then in proportion
    model = CostModel(costs, 5)
    metrics = after(accepted=2, drafted=4, rounds=10)
    depths = [model.budget(metrics, batch).depth for batch in (1, 4, 8, 16, 32)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 4 and depths[-1] == 0


def test_rejection_stops_drafting_and_time_lets_it_try_again() -> None:
    model = CostModel(Given(lambda rows: 1.0 + 0.2 * (rows - 1)), 5)
    metrics = after(accepted=0, drafted=5, rounds=20)
    assert model.budget(metrics, 1).depth == 0
    tries = 0
    while model.budget(metrics, 1).depth == 0:
        metrics.count_round(0, 0, 1)
        tries += 1
        assert tries < 300
    assert tries > 10


@pytest.mark.parametrize("batch", [1, 32])
def test_sampled_requests_draft_the_same_whatever_is_measured(batch: int) -> None:
    costs = Given(proportional)
    model = CostModel(costs, 5)
    assert model.budget(after(0, 5, 20), batch, sampled=True).depth == 5
    assert costs.measured == []

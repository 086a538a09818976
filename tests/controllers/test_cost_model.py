"""Prices from measured costs, and how many draft tokens are worth them."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given, strategies as st

from outpace.controllers.base import Budget
from outpace.controllers.cost_model import CostModel
from outpace.core.metrics import RequestMetrics
from outpace.targets.base import Sequence
from outpace.targets.costs import FixedCosts, ForwardCosts
from outpace.targets.table import TableTarget

METRICS = RequestMetrics()


class Given(ForwardCosts):
    """Costs by formula, and a record of what was asked."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        super().__init__(TableTarget(7))
        self._cost = cost
        self.measured: list[int] = []

    def _time(self, sequences: Seq[Sequence], rows: int) -> float:
        self.measured.append(rows)
        return self._cost(rows)


def flat(rows: int) -> float:
    return 1.0


def proportional(rows: int) -> float:
    return float(rows)


def test_costs_are_measured_at_powers_of_two_once_and_joined_by_lines() -> None:
    costs = Given(lambda rows: 10.0 + rows)
    assert [costs.seconds(rows) for rows in (1, 3, 4, 6, 6)] == [11.0, 13.0, 14.0, 16.0, 16.0]
    assert sorted(set(costs.measured)) == [1, 2, 4, 8, 16, 32]
    assert costs.seconds(1024) == 2 * costs.seconds(512)


def test_more_rows_never_cost_less_however_noisy_the_clock() -> None:
    noise = {1: 0.05, 2: 0.03, 4: 0.08, 8: 0.04, 16: 0.09, 32: 0.09, 64: 0.07}
    costs = Given(lambda rows: noise[rows])
    assert [costs.seconds(rows) for rows in (1, 2, 4, 8)] == [0.03, 0.03, 0.04, 0.04], (
        "one with fewer rows was disturbed"
    )
    assert costs.seconds(64) == 0.09, "what is known does not change"


@pytest.mark.parametrize(("unit", "measured"), [(1.0, [1, 2]), (0.001, [1, 2, 4, 8, 16, 32])])
def test_nobody_waits_for_a_slow_model_s_large_forwards_once_rows_cost_in_proportion(
    unit: float, measured: list[int]
) -> None:
    costs = Given(lambda rows: unit * rows)
    assert [costs.seconds(rows) for rows in (1, 2, 4, 8, 16)] == pytest.approx([unit * n for n in (1, 2, 4, 8, 16)])
    assert sorted(set(costs.measured)) == measured


def test_real_forwards_are_measured_without_leaving_a_trace() -> None:
    target = TableTarget(5, context_length=12)  # a vocabulary and a context smaller than what is measured
    costs = ForwardCosts(target)
    assert costs.seconds(48) >= costs.seconds(1) > 0


# ------------------------------------------------------------------------------------------------------- prices


def test_a_round_costs_its_rows_in_plain_steps_with_a_margin() -> None:
    costs = Given(lambda rows: 4.0 + 0.5 * rows)
    budget = CostModel(costs, most=6).budget(METRICS, 1)
    plain, *drafting = budget.relative_costs
    assert (plain, len(drafting), budget.depth, budget.max_nodes) == (1.0, 6, 6, 6)
    for count, relative_cost in enumerate(drafting, start=1):
        assert relative_cost > costs.seconds(1 + count) / costs.seconds(1), (
            "estimates are not exact: drafting must promise more"
        )
    assert drafting == sorted(drafting)


def test_a_batch_pays_for_the_rows_of_all() -> None:
    costs = Given(lambda rows: max(1.0, rows / 32))  # free up to 32 rows, then in proportion
    model = CostModel(costs)
    counts = [model.budget(METRICS, batch).best_draft_size(LIKELY) for batch in (1, 4, 8, 16, 32)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 4 and counts[-1] == 0


def test_prices_are_computed_once_for_each_batch() -> None:
    costs = Given(flat)
    model = CostModel(costs)
    first = model.budget(METRICS, 1)
    asked = len(costs.measured)
    assert model.budget(METRICS, 1) is first
    assert len(costs.measured) == asked


@pytest.mark.parametrize("batch", [1, 32])
def test_fixed_costs_draft_the_same_everywhere(batch: int) -> None:
    [budget, alone] = [CostModel(FixedCosts()).budget(METRICS, count, repeatable=True) for count in (batch, 1)]
    assert budget == alone
    assert budget.best_draft_size(LIKELY) > 2 > budget.best_draft_size(UNLIKELY)


# ------------------------------------------------------------------------------------------------ what they buy

LIKELY = [0.9**depth for depth in range(1, 17)]
UNLIKELY = [0.03**depth for depth in range(1, 17)]


def test_free_rows_are_all_taken_and_dear_ones_none() -> None:
    assert CostModel(Given(flat), most=9).budget(METRICS, 1).best_draft_size(LIKELY) == 9
    assert CostModel(Given(proportional)).budget(METRICS, 1).best_draft_size(LIKELY) == 0


def test_where_no_prices_are_known_everything_is_drafted() -> None:
    assert Budget(9, 4).best_draft_size(UNLIKELY) == 4
    assert Budget(9, 40).best_draft_size(iter(UNLIKELY)) == 16


@st.composite
def markets(draw: st.DrawFn) -> tuple[Budget, list[float]]:
    """Prices that never fall, and path estimates that never rise."""
    steps = draw(st.lists(st.floats(0, 1), max_size=12))
    relative_costs = tuple(accumulate(steps, initial=1.0))
    rates = draw(st.lists(st.floats(0, 1), max_size=15))
    return Budget(16, draw(st.integers(0, 16)), relative_costs=relative_costs), list(accumulate(rates, mul))


@given(markets())
def test_worth_is_the_best_pace_of_all_counts(market: tuple[Budget, list[float]]) -> None:
    budget, path_acceptance_probs = market
    most = min(budget.max_nodes, len(budget.relative_costs) - 1, len(path_acceptance_probs))
    paces = [(1 + sum(path_acceptance_probs[:count])) / budget.relative_costs[count] for count in range(most + 1)]
    found = budget.best_draft_size(iter(path_acceptance_probs))
    assert 0 <= found <= most
    assert paces[found] == pytest.approx(max(paces))
    assert all(pace < paces[found] * (1 + 1e-9) for pace in paces[:found]), "of equals the fewest"


@given(markets(), st.floats(0, 1))
def test_likelier_tokens_are_never_worth_less_where_each_costs_the_same(
    market: tuple[Budget, list[float]], share: float
) -> None:
    _, path_acceptance_probs = market
    even = Budget(16, 16, relative_costs=tuple(1 + 0.2 * count for count in range(17)))
    assert even.best_draft_size([share * one for one in path_acceptance_probs]) <= even.best_draft_size(
        path_acceptance_probs
    )


@given(markets(), st.integers(0, 12))
def test_dearer_rows_further_on_make_no_more_of_them_worth_it(market: tuple[Budget, list[float]], at: int) -> None:
    budget, path_acceptance_probs = market
    relative_costs = tuple(
        relative_cost * (2 if count > at else 1) for count, relative_cost in enumerate(budget.relative_costs)
    )
    assert Budget(16, budget.max_nodes, relative_costs=relative_costs).best_draft_size(
        path_acceptance_probs
    ) <= budget.best_draft_size(path_acceptance_probs)

"""What a forward of several sequences takes: their K/V caches are read, each once, and rows share their own's."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.controllers.predictor import CAUTION, MARGIN, Predictor
from outpace.targets.cost_table import CostTable
from outpace.targets.costs import OVERHEAD, FixedCosts, ForwardCosts
from outpace.targets.table import TableTarget

BASE, ROW, TOKEN = 2.0, 0.1, 0.001


def exact(rows: list[int], contexts: list[int]) -> float:
    """A forward: seconds for itself, for each row, and for each token in the K/V of each sequence."""
    return BASE + ROW * sum(rows) + TOKEN * sum(contexts)


class Linear(ForwardCosts):
    """Forwards take what :func:`exact` says."""

    def __init__(self, table: CostTable | None = None) -> None:
        super().__init__(TableTarget(7, context_length=6000), table)
        self.timed: list[tuple[int, int]] = []

    def _time(self, sequences: Any, rows: int) -> float:
        self.timed.append((len(sequences), rows))
        assert [len(one.kv) for one in sequences] == [len(sequences[0].tokens) - 1] * len(sequences)
        return exact([rows], [len(one.tokens) for one in sequences])


@pytest.mark.parametrize("batch", [2, 3, 8, 12, 32, 50])
@pytest.mark.parametrize("context", [16, 100, 2000])
def test_a_batch_reads_the_k_v_of_all_its_sequences(batch: int, context: int) -> None:
    costs = Linear()
    assert costs.even(batch, batch, context) == pytest.approx(exact([batch], [context] * batch))
    if context > 100:
        assert costs.even(batch, batch, context) > 1.1 * costs.seconds(batch, context), "one sequence's chain does not"


@pytest.mark.parametrize(
    ("rows", "contexts"),
    [
        ([3], [700]),
        ([1, 1], [20, 3000]),
        ([1, 5, 1, 2], [300, 40, 900, 16]),
        ([9, 1, 1, 1, 1, 1, 1, 1], [1000, *[100] * 7]),
    ],
)
def test_each_sequence_counts_with_its_own_rows_and_context(rows: list[int], contexts: list[int]) -> None:
    assert Linear().forward(rows, contexts) == pytest.approx(exact(rows, contexts))


def test_additional_rows_cost_what_their_own_context_makes_them_cost() -> None:
    class Attending(Linear):
        def _time(self, sequences: Any, rows: int) -> float:
            each = rows // len(sequences)
            return BASE + sum(each * TOKEN * len(one.tokens) for one in sequences)

    costs = Attending()
    long, short = costs.forward([5, 1], [1000, 16]), costs.forward([1, 5], [1000, 16])
    assert long == pytest.approx(BASE + TOKEN * (5 * 1000 + 16))
    assert short == pytest.approx(BASE + TOKEN * (1000 + 5 * 16))


class Dearer(Linear):
    """Rows of several sequences take twice what those of one do."""

    unit = 1.0

    def _time(self, sequences: Any, rows: int) -> float:
        beside = ROW * (rows - 1) if len(sequences) > 1 else 0.0
        return self.unit * (super()._time(sequences, rows) + beside)


@pytest.mark.parametrize("batch", [2, 8, 32])
@pytest.mark.parametrize("each", [1, 1.5, 2, 3, 4])
def test_more_rows_of_a_batch_are_measured_as_such(batch: int, each: float) -> None:
    costs, rows = Dearer(), round(batch * each)
    costs.unit = 1e-3
    found = costs.even(rows, batch, 100)
    assert found == pytest.approx(1e-3 * (exact([rows], [100] * batch) + ROW * (rows - 1)))
    assert {one for count, one in costs.timed if count == batch} == {batch, 2 * batch, 4 * batch}


def test_nobody_waits_for_a_slow_model_s_large_batches() -> None:
    costs = Dearer()
    one, more = costs.even(4, 4, 100), costs.even(12, 4, 100)
    assert {rows for count, rows in costs.timed if count == 4} == {4}
    assert more - one == pytest.approx(8 * ROW), "as much as of one sequence"


def test_batches_are_measured_once_and_kept() -> None:
    table = CostTable()
    costs = Linear(table)
    first = costs.even(8, 8, 256)
    measured = len(costs.timed)
    assert (8, 8) in costs.timed
    assert costs.even(8, 8, 256) == first
    assert costs.even(8, 8, 900) > first
    assert Linear(table).even(8, 8, 256) == first
    assert len([one for one in costs.timed if one[0] > 1]) == len([one for one in costs.timed[:measured] if one[0] > 1])


def test_a_batch_that_was_measured_on_a_busy_machine_is_measured_again() -> None:
    class Busy(Linear):
        load = 4.0

        def _time(self, sequences: Any, rows: int) -> float:
            return self.load * super()._time(sequences, rows)

    costs = Busy()
    assert costs.even(4, 4, 256) == pytest.approx(4 * exact([4], [256] * 4))
    costs.load = 1.0
    for _ in range(15):
        costs.took(4, 256, exact([4], [256] * 4), greedy=True, batch=4)
    assert costs.even(4, 4, 256) == pytest.approx(exact([4], [256] * 4))


def test_a_round_s_time_is_one_sum_for_whoever_asks() -> None:
    costs = Linear()
    predictor = Predictor(costs)
    whole = exact([12], [200] * 4) + OVERHEAD
    assert predictor.round_seconds(8, 4, 200) == pytest.approx(whole)
    step = exact([4], [200] * 4) + OVERHEAD
    [more] = predictor.relative_costs([8], 4, 200, live=False)
    assert more == pytest.approx(1 + (MARGIN - 1) / 4 + CAUTION * (whole / step - 1))


def test_fixed_costs_know_no_batch_and_no_context() -> None:
    costs = FixedCosts()
    assert costs.forward([3, 1], [5, 9000]) == costs.seconds(4) == costs.even(4, 2, 77)
    assert costs.reading(5, 1) == costs.seconds(5)


def test_prompts_are_read_in_measured_time() -> None:
    class Slow(TableTarget):
        clock = 0.0

        def prefill(self, sequences: Any, *more: Any) -> None:
            self.clock += sum(0.5 + 0.01 * (len(one.tokens) - 1) for one in sequences)
            super().prefill(sequences, *more)

    class Ticking(ForwardCosts):
        def _now(self) -> float:
            assert isinstance(self._target, Slow)
            return self._target.clock

    costs = Ticking(Slow(7, context_length=600))
    assert [costs.reading(rows) for rows in (16, 40, 64, 256)] == pytest.approx([0.66, 0.9, 1.14, 3.06])
    assert costs.reading(512) == pytest.approx(2 * 3.06), "in proportion beyond what is measured"

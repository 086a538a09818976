"""Recorded costs beside what rounds take in truth: live ratios of greedy and of sampled rounds, and busy machines."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.controllers.cost_model import CostModel
from outpace.core.metrics import RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.methods.registry import Context, build
from outpace.models.gguf_cache import CACHE_VARIABLE
from outpace.targets.base import Sequence
from outpace.targets.cost_table import CostTable, table_of
from outpace.targets.costs import ForwardCosts
from outpace.targets.round_times import RoundTimes
from outpace.targets.table import TableTarget, random_table


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Busy(ForwardCosts):
    """Forwards take ``load`` times as long as on an idle machine, larger ones ``uneven`` times that."""

    def __init__(self, load: float, table: CostTable | None = None, uneven: float = 1.0) -> None:
        super().__init__(TableTarget(7, context_length=10_000), table)
        self.load, self.uneven = load, uneven
        self.measured = 0

    def idle(self, rows: int) -> float:
        return 1e-3 * (4.0 + 0.2 * rows)

    def _time(self, sequences: Seq[Sequence], rows: int) -> float:
        self.measured += 1
        return self.idle(rows) * self.load * (self.uneven if rows >= 8 else 1.0)


def table() -> CostTable:
    return table_of("w", kind="TableTarget", precision="float32", device=torch.device("cpu"))


def rounds(costs: Busy, count: int, rows: int = 1, factor: float = 1.0, *, greedy: bool = True) -> None:
    for _ in range(count):
        costs.took(rows, 10, factor * costs.idle(rows) * costs.load, greedy=greedy)


def test_a_table_of_a_busy_machine_is_measured_again_and_the_file_is_corrected() -> None:
    costs = Busy(3.0, table(), uneven=2.0)
    CostModel(costs).budget(RequestMetrics(), 1)
    assert costs.seconds(8, 10) == pytest.approx(6 * costs.idle(8))
    costs.load, costs.uneven = 1.0, 1.0  # the other programs have ended
    rounds(costs, 40, factor=1.1)
    assert [costs.seconds(rows, 10) for rows in (1, 8)] == pytest.approx([costs.idle(rows) for rows in (1, 8)])
    later = Busy(9.0, table())
    assert later.seconds(8, 10) == pytest.approx(costs.idle(8)), "a later process reads the corrected times"
    assert later.measured == 0


def test_rounds_of_a_machine_that_is_busy_now_change_nothing_of_the_table() -> None:
    costs = Busy(1.0, table())
    before = [costs.seconds(rows, 10) for rows in (1, 4, 16)]
    measured, costs.load = costs.measured, 4.0
    rounds(costs, 600)
    assert [costs.seconds(rows, 10) for rows in (1, 4, 16)] == before
    assert costs.measured == measured


def test_a_second_busy_measurement_is_never_worse_than_the_first_and_is_not_repeated_at_once() -> None:
    costs = Busy(2.0)
    first = costs.seconds(1, 10)
    costs.load = 5.0
    for _ in range(15):
        costs.took(1, 10, 0.5 * first, greedy=True)
    assert costs.seconds(1, 10) == first, "measured again while other programs ran"
    measured = costs.measured
    for _ in range(60):
        costs.took(1, 10, 0.5 * first, greedy=True)
        costs.seconds(1, 10)
    assert costs.measured == measured


def test_requests_go_by_what_rounds_take_and_those_that_must_repeat_by_the_record() -> None:
    costs = Busy(1.0)
    model = CostModel(costs)
    recorded = model.budget(RequestMetrics(), 1, repeatable=True).relative_costs
    for _ in range(64):
        rounds(costs, 1, rows=1)
        rounds(costs, 1, rows=6, factor=3.0)
    live = model.budget(RequestMetrics(), 1).relative_costs
    assert live[5] > 2 * recorded[5]
    assert model.budget(RequestMetrics(), 1, repeatable=True).relative_costs == recorded


def test_rounds_of_sampled_requests_leave_greedy_ones_their_costs() -> None:
    costs = Busy(1.0)
    costs.seconds(6, 10)
    rounds(costs, 64, rows=6, factor=3.0, greedy=False)
    assert costs.round_seconds(6, 10, live=True) == costs.seconds(6, 10)


def test_sampled_requests_that_need_not_repeat_go_by_what_sampled_rounds_take() -> None:
    costs = Busy(1.0)
    model, sampled = CostModel(costs), RequestMetrics(sampled=True)
    recorded = model.budget(sampled, 1, repeatable=True).relative_costs
    for _ in range(64):
        rounds(costs, 1, rows=1)
        rounds(costs, 1, rows=6, factor=2.0)
    before = model.budget(sampled, 1).relative_costs
    assert before == model.budget(RequestMetrics(), 1).relative_costs, "none was timed: as greedy rounds take"
    for _ in range(64):
        rounds(costs, 1, rows=1, greedy=False)
        rounds(costs, 1, rows=6, factor=4.0, greedy=False)
    live = model.budget(sampled, 1).relative_costs
    assert live[5] > 1.5 * model.budget(RequestMetrics(), 1).relative_costs[5]
    assert model.budget(sampled, 1, repeatable=True).relative_costs == recorded


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_of_a_request_count_for_its_kind_and_no_other(temperature: float) -> None:
    target = TableTarget(12, random_table(12, 8))
    target.costs = costs = Busy(1.0)
    asked: set[tuple[bool, bool]] = set()
    seconds = costs.round_seconds

    def round_seconds(rows: int, context: int = 0, *, live: bool = False, sampled: bool = False, **more: Any) -> float:
        asked.add((live, sampled))
        return seconds(rows, context, live=live, sampled=sampled, **more)

    costs.round_seconds = round_seconds  # type: ignore[method-assign]
    decoder = Decoder(target)
    params = SamplingParams(temperature=temperature, seed=1)
    decoder.submit(Request((1, 2, 1), build("pld", Context(target)), params, 60, repeats=False))
    decoder.run()
    sampled = temperature > 0
    assert asked == {(True, sampled)}
    assert costs._rounds[sampled]._rounds > 0
    assert costs._rounds[not sampled]._rounds == 0


def test_nothing_is_measured_for_a_round_whose_costs_nobody_has_asked_for() -> None:
    costs = Busy(1.0)
    rounds(costs, 40)
    costs.seconds(1, 10)
    measured = costs.measured
    costs.took(100, 9000, 1.0, greedy=True)
    assert costs.measured == measured


def test_a_size_that_was_not_timed_takes_the_ratio_of_all() -> None:
    times = RoundTimes()
    assert times.ratio(4) == 1.0
    for _ in range(20):
        times.add(1, 1.2)
    assert times.ratio(4) == pytest.approx(1.2)
    for _ in range(64):
        times.add(4, 2.0)
    assert 1.5 < times.ratio(4) <= 2.5


def beside(times: RoundTimes, rows: int) -> float:
    """What a round over so many rows costs beside one of one row."""
    return times.ratio(rows) / times.ratio(1)


def test_a_machine_that_is_slow_for_a_while_makes_no_size_dearer_than_another() -> None:
    times = RoundTimes()
    for _ in range(64):
        times.add(1, 1.0)
        times.add(6, 1.1)
    for number in range(20):  # as bad as it gets: most rounds of this while are of one size
        times.add(1 if number % 4 == 3 else 6, 1.6 if number % 4 == 3 else 1.76)
    for _ in range(64):
        times.add(1, 1.0)
    assert 1.0 < beside(times, 6) < 1.2


def test_a_size_that_was_slow_at_first_is_not_dear_for_ever() -> None:
    """Nobody drafts so many tokens while they are dear: so no round shows that they no longer are."""
    times = RoundTimes()
    for _ in range(15):
        times.add(1, 1.0)
        times.add(6, 2.0)
    assert beside(times, 6) > 1.5
    for _ in range(256):
        times.add(1, 1.0)
    assert beside(times, 6) < 1.1


def test_a_recorded_draft_that_proves_too_long_is_replaced() -> None:
    costs = Busy(1.0, table())
    assert costs.once("draft", lambda: 8e-3) == 8e-3
    costs.correct("draft", 7.5e-3)
    assert costs.once("draft", lambda: 1.0) == 8e-3, "little is noise"
    costs.correct("draft", 2e-3)
    assert costs.once("draft", lambda: 1.0) == 2e-3
    assert table().once("draft", lambda: 1.0) == 2e-3


def test_a_round_that_was_held_up_does_not_make_the_others_seem_quick() -> None:
    times = RoundTimes()
    for number in range(1, 65):
        times.add(1 if number % 2 else 6, 150.0 if number == 40 else 1.05)
    assert times.ratio(1) == pytest.approx(1.05, rel=0.25)
    assert times.ratio(6) == pytest.approx(1.05, rel=0.25)

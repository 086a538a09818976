"""This machine, simulated: rounds by their own requests, and what a server adds to them, fitted to its traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outpace.engine.round_overhead import DRAFTED, RoundOverhead, measure_overhead, overhead_of
from outpace.engine.round_records import RoundRecord
from outpace.simulate import served_rounds
from outpace.simulate.acceptance import SimulatedRound
from outpace.simulate.draft_times import RecordedDrafts
from outpace.simulate.machines import MeasuredMachine, rows_beside
from outpace.simulate.served_rounds import ServedRounds, fit, turnaround
from outpace.targets.costs import FixedCosts, ForwardCosts
from outpace.targets.table import TableTarget
from outpace.traces.trace_format import Rounds, TracedRequest


class ByContext(FixedCosts):
    """A second for each row, and one for each token in the K/V of a sequence."""

    def forward(self, rows: list[int], contexts: list[int]) -> float:  # type: ignore[override]
        return float(sum(rows) + sum(contexts))

    def reading(self, rows: int, context: int = 0) -> float:
        return 0.5 * rows + context


def request(count: int, batch: int, gap: float, *, arrival: float = 0.0, reading: float = 0.0) -> TracedRequest:
    """``count`` rounds of 2 s each in a batch, ``gap`` seconds apart, ``reading`` seconds of which are others'."""
    rounds = Rounds((0,) * count, (0,) * count, (1,) * count, (batch,) * count, (2000.0,) * count, (0.0,) * count)
    seconds = 5.0 + (count - 1) * (2.0 + gap) + reading
    return TracedRequest("q", "none", 11, count, rounds, arrival=arrival, first_token=5.0, seconds=seconds)


def test_what_a_server_adds_is_found_again_in_its_traces() -> None:
    fixed, each = 0.3, 0.05
    traces = [[request(30, batch, fixed + each * batch) for _ in range(3)] for batch in (1, 8)]
    found = fit(traces, lambda rows, contexts: 1.6, lambda rows: 1.5)
    assert dict(found.slow) == pytest.approx({1: 2.0 / 1.6, 8: 2.0 / 1.6})
    assert dict(found.gap) == pytest.approx({1: fixed + each, 8: fixed + 8 * each})
    assert found.reading == pytest.approx(3.0 / 1.5), "5 s until the first token, 2 s of them in the first round"
    assert found.seconds(10.0, 4) == pytest.approx(12.5)
    assert found.between(4) == pytest.approx(0.3 + 0.2)


def test_prompts_of_others_that_were_read_meanwhile_are_no_gap() -> None:
    """Rounds take twice as long in the server as outside, and so does reading, 7 s there."""
    first = request(30, 2, 0.4, reading=2 * 7.0)
    second = request(20, 2, 0.4, arrival=20.0)
    found = fit([[first, second]], lambda rows, contexts: 1.0, lambda rows: 7.0)
    assert dict(found.slow) == pytest.approx({2: 2.0})
    assert dict(found.gap) == pytest.approx({2: 0.4})
    assert found.reading == pytest.approx(2.0)


def test_a_prompt_that_waited_is_read_while_others_decode() -> None:
    """Both come at once. The first is read until 3 s, its first round ends at 5; the second from then on until 12."""
    first = request(30, 2, 0.4, reading=7.0)
    second = replace(request(20, 2, 0.4), first_token=14.0, seconds=14.0 + 19 * 2.4)
    found = fit([[first, second]], lambda rows, contexts: 2.0, lambda rows: 9.0)
    assert dict(found.gap) == pytest.approx({2: 0.4}), "7 of its 9 s lie between rounds of the first"


def test_what_reading_takes_is_told_by_who_is_alone_and_gaps_by_each_trace() -> None:
    """Alone a prompt takes half as long as outside of the server; so does the one that was read beside the four."""
    alone = [request(30, 1, 1.0) for _ in range(3)]
    four = [request(30, 4, 0.2, reading=3.0), request(20, 4, 0.2, arrival=20.0)]
    found = fit([four, alone], lambda rows, contexts: 2.0, lambda rows: 6.0)
    assert found.reading == pytest.approx(0.5)
    assert dict(found.gap) == pytest.approx({1: 1.0, 4: 0.2})
    assert found.between(2) == pytest.approx(1.0 - 0.8 / 3)


def test_prompts_that_are_read_beside_rounds_are_read_in_chunks() -> None:
    """Reading at once takes 7 s; in the chunks beside rounds 9 s, and as long in the server."""
    first, second = request(30, 2, 0.4, reading=9.0), request(20, 2, 0.4, arrival=20.0)
    found = fit([[first, second]], lambda rows, contexts: 2.0, lambda rows: 7.0, lambda rows: 9.0)
    assert dict(found.gap) == pytest.approx({2: 0.4})
    machine = MeasuredMachine(ByContext(), 1)
    chunk = rows_beside(machine)
    rows = 2 * chunk + 3
    assert machine.beside(rows) == pytest.approx(0.5 * rows + chunk + 2 * chunk), "each chunk after those before it"


def test_users_take_a_while_to_ask_again() -> None:
    """Two users: answers end at 5 and 6 s, the next requests come half a second later."""

    def one(arrival: float, seconds: float) -> TracedRequest:
        return replace(request(2, 2, 0.1), arrival=arrival, seconds=seconds)

    asked = [one(0.0, 6.0), one(0.0, 5.0), one(5.5, 4.0), one(6.5, 4.0)]
    assert turnaround(asked, 2) == pytest.approx(0.5)
    assert turnaround(asked[:2], 2) == 0.0
    assert turnaround([replace(one, arrival=None) for one in asked], 2) == 0.0


def test_traces_without_times_fit_nothing() -> None:
    timeless = replace(request(30, 1, 0.4), arrival=None)
    assert fit([[timeless]], lambda rows, contexts: 1.0, lambda rows: 1.0) == ServedRounds()
    assert fit([], lambda rows, contexts: 1.0, lambda rows: 1.0) == ServedRounds()
    assert fit([[request(1, 1, 0.4)]], lambda rows, contexts: 1.0, lambda rows: 1.0) == ServedRounds()


def test_a_measured_round_is_its_requests_forward_and_what_lies_beside_it() -> None:
    overhead = RoundOverhead(fixed=0.5, each=0.1, slow=2.0)
    machine = MeasuredMachine(ByContext(), 1, None, overhead)
    assert machine.round([1, 1], [10, 20]) == pytest.approx([2 * 32 + 0.7])
    assert machine.round([1, 4], [10, 20]) == pytest.approx([2 * 32 + 0.7]), "its weights are waited for meanwhile"
    assert machine.round([1, 94], [10, 20]) == pytest.approx([125 + 0.7])
    assert machine.chunk([8], [3]) == pytest.approx([7.0])
    machine.served = ServedRounds(((1, 1.0), (3, 2.0)), ((1, 0.21), (3, 0.23)), 1.2)
    assert machine.round([1, 4], [10, 20]) == pytest.approx([1.5 * 64.7]), "linear between the batches of the traces"
    assert machine.between(2) == pytest.approx(0.22)
    assert machine.chunk([8], [3]) == pytest.approx([1.2 * 7.0])
    assert machine.chunk([3, 5], [7, 1]) == pytest.approx([1.2 * (4.0 + 26 // 8)]), "one forward"
    assert any("2.00 times (batch 3)" in line for line in machine.public()["fitted"])


def test_drafts_slow_a_forward_down_by_as_much_as_was_measured() -> None:
    overhead = RoundOverhead(fixed=0.5, slow=2.0, busy=1.2, row=0.01)
    seconds = overhead.seconds(ByContext(), [1 + DRAFTED] * 2, [100, 100])
    assert seconds == pytest.approx(2.0 * 202 + 0.5 + 2 * DRAFTED * 0.01), "no quicker than without a draft"
    none_waits = RoundOverhead(slow=1.0, busy=1.5)
    assert none_waits.seconds(ByContext(), [1 + DRAFTED], [100]) == pytest.approx(1.5 * (100 + 1 + DRAFTED))
    assert none_waits.seconds(ByContext(), [8 + 3 * DRAFTED], [100]) == pytest.approx(1.5 * (108 + 3 * DRAFTED))
    assert none_waits.seconds(ByContext(), [2], [100]) == pytest.approx((1 + 0.5 / DRAFTED) * 102)


def record(batch: int, forward: float, beside: float, drafted: int = 0) -> RoundRecord:
    nothing = (0,) * batch
    return RoundRecord(nothing, (drafted,) * batch, (1,) * batch, 0.0, forward + beside, (10,) * batch, forward)


def test_overheads_follow_from_rounds_of_one_request_and_of_many() -> None:
    few, many = [record(1, 22.0, 0.6)] * 5, [record(8, 176.0, 1.3)] * 5
    found = overhead_of([*few, record(1, 900.0, 50.0)], many, ByContext())
    assert (found.fixed, found.each, found.slow) == pytest.approx((0.5, 0.1, 2.0))
    drafts = [record(1, 1.5 * 18, 0.6 + 0.07, DRAFTED)] * 3, [record(8, 1.1 * 144, 1.3 + 0.56, DRAFTED)] * 3
    both = overhead_of([*few, *drafts[0]], [*many, *drafts[1]], ByContext())
    assert (both.fixed, both.each, both.slow) == pytest.approx((0.5, 0.1, 2.0))
    assert (both.busy, both.row) == pytest.approx((1.3, 0.01))
    negative = overhead_of([record(1, 22.0, 0.6)], [record(8, 176.0, 0.1)], ByContext())
    assert (negative.fixed, negative.each) == pytest.approx((0.6, 0.0))


def test_overheads_are_measured_on_real_rounds() -> None:
    target = TableTarget(9, context_length=300)
    target.costs = ForwardCosts(target)
    found = measure_overhead(target)
    assert 0 < found.fixed + found.each < 0.5
    assert found.slow > 0.2 and found.busy > 0.2 and 0 <= found.row < 0.1


def test_drafts_of_different_recorded_rounds_take_their_mean_time() -> None:
    rounds = [SimulatedRound(2, 1, 0.004), SimulatedRound(3, 1, 0.002)]
    assert RecordedDrafts().seconds("pld", rounds, 10) == pytest.approx(0.003)
    only_one = [SimulatedRound(2, 1, 0.004), SimulatedRound(0, 1, 0.0), SimulatedRound(0, 1, 0.001)]
    assert RecordedDrafts().seconds("draft-model", only_one, 10) == pytest.approx(0.004)
    assert RecordedDrafts().seconds("draft-model", only_one[1:], 10) == pytest.approx(0.0005)


def test_sizes_of_a_batch_that_are_rare_stand_together() -> None:
    found = dict(
        served_rounds._by_batch(
            [served_rounds._Round(1, 2.0, 1.0)] * 80
            + [served_rounds._Round(size, 3.0, 2.0) for size in (2, 3, 4, 5)] * 3
            + [served_rounds._Round(9, 5.0, 1.0)] * 5
        )
    )
    assert found == pytest.approx({1: 2.0, (3 * 14 + 45) / 17: (36.0 + 25.0) / (24.0 + 5.0)})


def test_what_a_trace_says_stands_at_the_mean_of_its_batches() -> None:
    """A server for 32 users may have four in most of its rounds, while prompts are read. A round of eight is seen by
    eight requests, and is one."""
    one = request(30, 8, 0.4)
    mixed = replace(one, rounds=replace(one.rounds, batch=(8,) * 10 + (2,) * 20))
    found = fit([[mixed]], lambda rows, contexts: 1.6, lambda rows: 1.5)
    assert [batch for batch, _ in found.gap] == pytest.approx([29 / (9 / 8 + 20 / 2)])

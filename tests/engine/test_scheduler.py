"""Scheduler: order, bounds and fairness, with a clock that stands still unless it is moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from outpace.core.errors import BadInput
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.engine.scheduler import ROUND_ROWS, Limits, QueueFull, Scheduler
from outpace.engine.shared_decoder import Ticket
from outpace.targets.table import TableTarget
from support import method

TARGET = TableTarget(11, seed=3, context_length=4000)
TARGET.kv_bytes_per_token = 10
METHOD = method(None)


class Hands:
    """A clock that is moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def ticket(prompt: int = 4, **about: object) -> Ticket:
    return Ticket(replace(Request((1,) * prompt, METHOD), **about), lambda *_: None)  # type: ignore[arg-type]


def scheduler(**limits: int) -> tuple[Scheduler, Hands]:
    clock = Hands()
    return Scheduler(TARGET, Limits(**limits), clock), clock


def add(plans: Scheduler, clock: Hands, *tickets: Ticket, running: tuple[Ticket, ...] = ()) -> None:
    for one in tickets:
        plans.add([one], running)
        clock.now += 1


def test_first_come_first_served_up_to_the_batch() -> None:
    plans, clock = scheduler(max_batch=2)
    one, two, three = ticket(), ticket(), ticket()
    add(plans, clock, one, two, three)
    assert plans.plan([]).admit == [one, two]
    assert plans.plan([one, two]).admit == []
    assert plans.plan([two]).admit == [three]
    assert plans.waiting == []


def test_higher_priority_goes_first() -> None:
    plans, clock = scheduler(max_batch=1)
    usual, urgent = ticket(), ticket(priority=3)
    add(plans, clock, usual, urgent)
    assert plans.plan([]).admit == [urgent]


def test_the_tenant_that_was_served_least_goes_first() -> None:
    plans, clock = scheduler(max_batch=1)
    greedy = [ticket(tenant="many") for _ in range(3)]
    add(plans, clock, *greedy)
    assert plans.plan([]).admit == [greedy[0]]
    plans.served("many", 4, 20)
    other = ticket(tenant="few")
    add(plans, clock, other, running=(greedy[0],))
    # It came with the counter of the least served that is present, so that having been away is no advantage ...
    plans.served("many", 0, 1)
    assert plans.plan([]).admit == [other]  # ... and what was served since decides.


def test_who_fills_the_queue_locks_nobody_else_out() -> None:
    plans, clock = scheduler(max_batch=2, max_queue=3)
    running = (ticket(tenant="many"), ticket(tenant="many"))
    add(plans, clock, *[ticket(tenant="many") for _ in range(3)], running=running)
    with pytest.raises(QueueFull):
        plans.add([ticket(tenant="many")], running)
    with pytest.raises(QueueFull):
        plans.add([ticket(tenant="few") for _ in range(3)], running)
    plans.add([ticket(tenant="few"), ticket(tenant="few")], running)
    with pytest.raises(QueueFull):  # it has had its part of the room
        plans.add([ticket(tenant="few")], running)


def test_calls_that_are_prepared_count_as_waiting() -> None:
    plans, _ = scheduler(max_batch=2, max_queue=3)
    plans.check_room(1, (), "many", {"many": 4})
    with pytest.raises(QueueFull):
        plans.check_room(1, (), "many", {"many": 5})
    plans.check_room(2, (), "few", {"many": 5})
    with pytest.raises(QueueFull):
        plans.check_room(1, (), "few", {"many": 6, "few": 1})


def test_who_was_served_alone_does_not_wait_for_one_that_comes_later() -> None:
    """What a tenant had while nobody else was there is not counted against it."""
    plans, clock = scheduler(max_batch=1)
    first = ticket(tenant="old")
    add(plans, clock, first)
    assert plans.plan([]).admit == [first]
    plans.served("old", 4, 1_000_000)
    crowd = [ticket(tenant="new") for _ in range(3)]
    add(plans, clock, *crowd)
    late = ticket(tenant="old")
    add(plans, clock, late)
    assert plans.plan([]).admit == [crowd[0]]
    plans.served("new", 4, 10)
    assert plans.plan([]).admit == [late]


def test_one_tenant_does_not_fill_a_whole_batch_while_another_waits() -> None:
    plans, clock = scheduler(max_batch=4)
    add(plans, clock, *[ticket(tenant="many") for _ in range(6)], *[ticket(tenant="few") for _ in range(2)])
    admitted = [one.request.tenant for one in plans.plan([]).admit]
    assert sorted(admitted) == ["few", "few", "many", "many"]


def test_a_full_queue_refuses_all_or_nothing() -> None:
    plans, _clock = scheduler(max_batch=1, max_queue=2)
    plans.add([ticket(), ticket(), ticket()], [])  # one runs at once, two wait
    plans.plan([])
    with pytest.raises(QueueFull, match="2 requests are waiting, which is the limit; try again in 1 s") as refused:
        plans.add([ticket()], [ticket()])
    assert refused.value.retry_after == 1.0
    assert len(plans.waiting) == 2


def test_how_long_a_full_queue_takes_is_learned() -> None:
    plans, clock = scheduler(max_batch=2, max_queue=0)
    slow = ticket()
    plans.add([slow], [])
    clock.now += 30
    plans.ended(slow)
    assert plans.retry_after() == 15.0


def test_what_exceeds_its_time_limit_is_named_wherever_it_is() -> None:
    plans, clock = scheduler(max_batch=1)
    running, waiting, patient = ticket(time_limit=5.0), ticket(time_limit=5.0), ticket()
    add(plans, clock, running, waiting, patient)
    [admitted] = plans.plan([]).admit
    assert admitted is running
    clock.now += 5
    plan = plans.plan([running])
    assert plan.overdue == [running, waiting]
    assert plan.admit == [patient]


def test_the_bound_on_memory_is_never_planned_to_be_exceeded() -> None:
    each = (4 + ROUND_ROWS) * TARGET.kv_bytes_per_token
    plans, clock = scheduler(max_batch=8, kv_bytes=2 * each + 1)
    tickets = [ticket() for _ in range(4)]
    add(plans, clock, *tickets)
    plan = plans.plan([])
    assert plan.admit == tickets[:2]
    assert plan.kv_bytes == 2 * each


def test_nobody_overtakes_one_that_waits_for_memory() -> None:
    each = (4 + ROUND_ROWS) * TARGET.kv_bytes_per_token
    plans, clock = scheduler(max_batch=8, kv_bytes=2 * each)
    first, large, small = ticket(), ticket(60), ticket()
    add(plans, clock, first, large, small)
    assert plans.plan([]).admit == [first]
    assert plans.waiting == [large, small]


def test_a_prompt_that_never_fits_is_refused_in_words() -> None:
    plans, _ = scheduler(kv_bytes=1000)
    with pytest.raises(BadInput, match="90 tokens, whose K/V would take 1,540 bytes; the bound is 1,000"):
        plans.check(ticket(90).request)


def running(tokens: int, **about: object) -> Ticket:
    one = ticket(4, **about)
    decoder = Decoder(TARGET)
    one.generation = decoder.submit(one.request)
    one.generation.sequence.tokens += [1] * (tokens - 4)
    TARGET.prefill([one.generation.sequence])
    return one


def test_what_outgrows_the_bound_makes_the_least_important_wait() -> None:
    plans, _ = scheduler(kv_bytes=10 * (20 + ROUND_ROWS + 20 + ROUND_ROWS) - 1)
    old, new = running(20), running(20)
    old.arrived, new.arrived = 1.0, 2.0
    assert plans.plan([old, new]).preempt == [new]
    new.request = replace(new.request, priority=1)
    assert plans.plan([old, new]).preempt == [old]
    alone = scheduler(kv_bytes=100)[0].plan([old])
    assert alone.full == [old]
    assert alone.preempt == []


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.sampled_from("abc")), max_size=12),
    st.integers(1, 4),
    st.integers(1000, 4000),
)
def test_everybody_is_served_and_bounds_hold(asked: list[tuple[int, int, str]], batch: int, kv_bytes: int) -> None:
    plans, clock = scheduler(max_batch=batch, kv_bytes=kv_bytes)
    tickets = [ticket(size, priority=priority, tenant=tenant) for size, priority, tenant in asked]
    add(plans, clock, *tickets)
    served: list[Ticket] = []
    for _ in range(len(tickets)):
        plan = plans.plan([])
        assert len(plan.admit) <= batch
        assert plan.kv_bytes <= kv_bytes or len(plan.admit) == 1
        assert plan.kv_bytes == sum((len(one.request.prompt) + ROUND_ROWS) * 10 for one in plan.admit)
        for one in plan.admit:
            plans.served(one.request.tenant, len(one.request.prompt), 10)
        served += plan.admit
    assert sorted(map(id, served)) == sorted(map(id, tickets))


@pytest.mark.parametrize("name", ["max_batch", "kv_bytes", "prefill_rows"])
def test_bounds_that_allow_nothing_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} must be at least 1, not 0"):
        Limits(**{name: 0})


def test_the_rows_of_prompts_beside_answers_follow_the_limits() -> None:
    plans, _ = scheduler(prefill_rows=32)
    assert plans.rows_beside() == 32
    plans.limits = replace(plans.limits, prefill_rows=7)
    assert plans.rows_beside() == 7
    plans.limits = replace(plans.limits, prefill_rows=None)
    measured = plans.rows_beside()
    plans.limits = replace(plans.limits, prefill_rows=measured + 1)
    assert plans.rows_beside() == measured + 1


def test_all_requests_of_one_call_begin_with_the_counter_of_the_least_served() -> None:
    plans, clock = scheduler(max_batch=1)
    add(plans, clock, ticket(tenant="many"))
    plans.served("many", 4, 20)
    plans.add([ticket(tenant="other"), ticket(tenant="other")], [])
    assert plans._service["other"] == plans._service["many"]

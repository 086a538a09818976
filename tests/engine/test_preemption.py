"""Requests that have to wait again for lack of memory give the answers that they would give alone."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

import support
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.populations.beam_options import BeamOptions
from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.request import Request
from outpace.engine.scheduler import ROUND_ROWS, Closed, DeadlineExceeded, Limits, Plan, QueueFull
from outpace.engine.shared_decoder import SharedDecoder, Ticket
from outpace.methods.bindings import Bindings
from outpace.methods.registry import Context, build
from support import Releasing, toy_growers

VOCAB = 11
TOKENS = 90
PROMPTS = [(1, 2, 3), (4, 4), (5, 6, 7, 8), (2, 2, 9)]


def table() -> Releasing:
    target = Releasing(VOCAB, seed=3, context_length=4000)
    target.kv_bytes_per_token = 10
    return target


def methods(target: Releasing) -> dict[str, Method]:
    found = {name: support.method(*grow, name=name) for name, grow in toy_growers(VOCAB).items()}
    found |= {name: build(name, Context(target, Bindings())) for name in ("none", "sam", "recycling", "swift")}
    return found


def ended(decoder: SharedDecoder, requests: Seq[Request]) -> list[Ticket]:
    told: SimpleQueue[Ticket] = SimpleQueue()

    def listen(ticket: Ticket, piece: str | None) -> None:
        if piece is None:
            told.put(ticket)

    tickets = decoder.submit([(one, listen) for one in requests])
    for _ in tickets:
        told.get(timeout=60)
    assert told.empty(), "a request was told of its end twice"
    return tickets


def requests(method: Method, temperature: float, **about: Any) -> list[Request]:
    params = SamplingParams(temperature=temperature, seed=7)
    return [Request(one, method, params, TOKENS, **about) for one in PROMPTS]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", [*toy_growers(VOCAB), "none", "sam", "recycling", "swift"])
def test_preempted_requests_go_on_where_they_stopped(name: str, temperature: float, cached: bool) -> None:
    target = table()
    expected = []
    for request in requests(methods(target)[name], temperature):
        expected.append(Decoder(target).submit(request))
        decoder = Decoder(target)
        expected[-1] = decoder.submit(request)
        decoder.run()
    bound = 2 * 10 * (TOKENS + ROUND_ROWS)
    prefixes = PrefixCache(target, bound) if cached else None
    shared = SharedDecoder(target, limits=Limits(kv_bytes=bound), prefixes=prefixes)
    owner = "somebody" if cached else None
    tickets = ended(shared, requests(methods(target)[name], temperature, prefix_owner=owner))
    found = [ticket.finished() for ticket in tickets]
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert sum(one.metrics.preemptions for one in found) > 0
    events = [event for event, _ in next(t for t in tickets if t.finished().metrics.preemptions).timeline]
    assert events[:4] == ["waiting", "admitted", "decoding", "preempted"]
    assert events[-1] == "ended"
    shared.stop()
    assert [one for one in target.held.values() if one] == []


def test_a_request_alone_ends_where_memory_does() -> None:
    target = table()
    shared = SharedDecoder(target, limits=Limits(kv_bytes=10 * (50 + ROUND_ROWS)))
    [ticket] = ended(shared, requests(support.method(None), 0.0)[:1])
    one = ticket.finished()
    assert one.finish_reason == "length"
    assert 40 <= len(one.tokens) <= 51


def beams(prompt: tuple[int, ...], **about: Any) -> Request:
    given: dict[str, Any] = {"max_new_tokens": TOKENS, "beams": BeamOptions(3, early_stopping="never")}
    return Request(prompt, support.method(None), SamplingParams(temperature=0.0), **{**given, **about})


def test_groups_that_wait_again_keep_to_the_bound_and_give_the_same_answers() -> None:
    target = table()
    expected = []
    for prompt in PROMPTS:
        decoder = Decoder(target)
        expected.append(decoder.submit(beams(prompt)))
        decoder.run()
    bound = 7 * 10 * (len(PROMPTS[0]) + TOKENS + ROUND_ROWS)  # two groups to begin with, not quite two at their end
    shared = SharedDecoder(target, limits=Limits(kv_bytes=bound))
    planned, plan = list[int](), shared.scheduler.plan

    def watched(running: Seq[Ticket]) -> Plan:
        found = plan(running)
        planned.append(found.kv_bytes)
        return found

    shared.scheduler.plan = watched  # type: ignore[method-assign]
    found = [one.finished() for one in ended(shared, [beams(prompt) for prompt in PROMPTS])]
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    again = [one.metrics.preemptions for one in found]
    assert sum(again) > 0 and max(again) <= 2, "it was admitted before there was room for what it has"
    assert max(planned) <= bound


def test_a_group_that_could_outgrow_the_bound_is_refused_beforehand() -> None:
    target = table()
    shared = SharedDecoder(target, limits=Limits(kv_bytes=4 * 10 * (40 + ROUND_ROWS)))
    [ticket] = ended(shared, [beams(PROMPTS[0])])
    with pytest.raises(BadInput, match=r"3 beams of 93 tokens would take .* Lower their number or max_tokens"):
        ticket.finished()
    [ticket] = ended(shared, [beams(PROMPTS[0], max_new_tokens=30)])
    assert len(ticket.finished().tokens) == 30


def test_a_long_prompt_does_not_stop_answers_under_way() -> None:
    """While it is read, a step reads a portion of it and decodes for everybody else."""
    target = table()
    decoder = Decoder(target)
    early = decoder.submit(Request((1, 2), support.method(None), max_new_tokens=50))
    decoder.step()
    late = decoder.submit(Request((3,) * 1000, support.method(None), max_new_tokens=50))
    counts = []
    while not late.tokens:
        decoder.step(100)
        counts.append((len(early.tokens), target.length(late.sequence.kv)))
    assert counts == [(2 + at, min(999, 100 * (1 + at)) + (at == 9)) for at in range(10)]


@pytest.mark.parametrize("other", [False, True])
def test_a_short_prompt_does_not_wait_until_a_long_one_has_been_read(other: bool) -> None:
    """Whatever its drafter reads; the long one gets half of the rows at least, and each step reads its rows."""
    target = table()
    decoder = Decoder(target)
    reading = support.Toy(support.certain_tree(5, VOCAB), support.CERTAIN_TREE)
    if other:
        reading.aux_hidden_state_layers = (1,)  # in a group of its own
    long = decoder.submit(Request((3,) * 1000, support.method(None), max_new_tokens=50))
    decoder.step(16)
    for again in range(10):
        asked = Request((1, 2, 3, 4) * 4, replace(support.method(None), drafter=reading), max_new_tokens=50)
        short = decoder.submit(asked)
        before = target.length(long.sequence.kv)
        for _ in range(2):
            decoder.step(16)
            if short.prompt_read:
                break
        assert short.prompt_read
        decoder.step(16)
        assert target.length(long.sequence.kv) - before >= 16, again
        short.cancel()
    assert not long.prompt_read


def test_prompts_are_read_in_the_order_of_their_priorities() -> None:
    target = table()
    decoder = Decoder(target)
    prompts = [((3,) * 400, 0), ((4,) * 300, 1), ((5,) * 20, 0), ((6,) * 100, 1)]
    ones = [
        decoder.submit(Request(prompt, support.method(None), max_new_tokens=500, priority=priority))
        for prompt, priority in prompts
    ]
    order: list[int] = []
    while len(order) < 4:
        decoder.step(50)
        order += [at for at, one in enumerate(ones) if one.prompt_read and at not in order]
    assert order == [3, 1, 2, 0]


def test_portions_of_a_prompt_are_chosen_by_what_is_measured() -> None:
    shared = SharedDecoder(table())
    assert shared.scheduler.rows_beside() == 16  # by nominal costs, from which on a row costs no less
    shared = SharedDecoder(table(), limits=Limits(prefill_rows=48))
    assert shared.scheduler.rows_beside() == 48


def test_requests_end_at_their_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    target = table()
    honest = Releasing.score

    def slow(self: Releasing, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return honest(self, *args, **kwargs)

    monkeypatch.setattr(Releasing, "score", slow)
    shared = SharedDecoder(target, limits=Limits(max_batch=2))
    asked = requests(support.method(None), 0.0, time_limit=0.3)
    for ticket in ended(shared, asked):
        with pytest.raises(DeadlineExceeded, match=r"the request took longer than its limit of 0\.3 s"):
            ticket.finished()
    shared.stop()
    assert target.held == {}


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    target = table()
    shared = SharedDecoder(target, limits=Limits(max_batch=1))
    ends: SimpleQueue[Ticket] = SimpleQueue()
    tickets = shared.submit([(one, lambda ticket, piece: ends.put(ticket) if piece is None else None)
                             for one in requests(support.method(None), 0.0)])  # fmt: skip
    assert shared.drain(60)
    assert [len(one.finished().tokens) for one in tickets] == [TOKENS] * len(PROMPTS)
    with pytest.raises(Closed, match="shutting down"):
        shared.submit([(requests(support.method(None), 0.0)[0], lambda *_: None)])
    assert target.held == {}


def test_a_full_queue_is_said_at_once() -> None:
    shared = SharedDecoder(table(), limits=Limits(max_batch=1, max_queue=1))
    with pytest.raises(QueueFull):
        shared.submit([(one, lambda *_: None) for one in requests(support.method(None), 0.0)])
    assert (shared.waiting, shared.running) == ([], [])


def test_one_that_waits_again_can_be_cancelled() -> None:
    target = table()
    shared = SharedDecoder(target, limits=Limits(kv_bytes=2 * 10 * (40 + ROUND_ROWS)))
    told: SimpleQueue[Ticket] = SimpleQueue()

    def listen(ticket: Ticket, piece: str | None) -> None:
        if piece is None:
            told.put(ticket)
        elif any(event == "preempted" for event, _ in ticket.timeline):
            ticket.cancel()
        for other in shared.waiting:
            if other.generation is not None:
                other.cancel()

    tickets = shared.submit([(one, listen) for one in requests(support.method(None), 0.0)])
    for _ in tickets:
        told.get(timeout=60)
    reasons = [ticket.finished().finish_reason for ticket in tickets]
    assert "cancelled" in reasons
    assert set(reasons) <= {"cancelled", "length"}
    shared.stop()
    assert target.held == {}


def test_repeated_prompts_are_read_once() -> None:
    target = table()
    prefixes = PrefixCache(target, 1 << 20)
    shared = SharedDecoder(target, prefixes=prefixes)
    prompt = tuple(1 + at % 9 for at in range(100))
    method = support.method(None)
    found = []
    for owner in ("a", "a", "b", None, None):
        [ticket] = ended(shared, [Request(prompt, method, max_new_tokens=5, prefix_owner=owner)])
        found.append(ticket.finished())
    assert [one.metrics.cached_tokens for one in found] == [0, 96, 0, 0, 0]
    assert len({tuple(one.tokens) for one in found}) == 1
    assert (prefixes.use.asked, prefixes.use.found) == (3 * 99, 96)

"""The shared decoder when things go wrong: defects, cancellations, time limits and lack of memory at every point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

import support
from outpace.core.sampling import SamplingParams
from outpace.drafting.base import DraftState
from outpace.engine.method import Method
from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.request import Request
from outpace.engine.scheduler import ROUND_ROWS, DeadlineExceeded, Limits
from outpace.engine.shared_decoder import SharedDecoder, Ticket
from outpace.targets.base import Sequence
from support import CERTAIN_TREE, Releasing, certain_tree

VOCAB = 11
TOKENS = 60


def table() -> Releasing:
    target = Releasing(VOCAB, seed=3, context_length=4000)
    target.kv_bytes_per_token = 10
    return target


class Holding(support.Toy):
    """A drafter that counts the requests that it holds something of."""

    def __init__(self) -> None:
        super().__init__(certain_tree(5, VOCAB), CERTAIN_TREE)
        self.held: list[DraftState] = []

    def begin(self, sequence: Sequence) -> DraftState:
        self.held.append(DraftState(sequence))
        return self.held[-1]

    def end(self, state: DraftState) -> None:
        assert any(one is state for one in self.held), "ended twice, or never begun"
        self.held = [one for one in self.held if one is not state]


def holding() -> tuple[Method, Holding]:
    made = support.method(certain_tree(5, VOCAB), CERTAIN_TREE)
    drafter = Holding()
    return replace(made, drafter=drafter), drafter


class Run:
    """A shared decoder whose steps are looked at: ``each`` is called on its thread before every plan.

    Nothing runs before :meth:`ended` waits.
    """

    def __init__(self, target: Releasing, prefixes: PrefixCache | None = None, **limits: Any) -> None:
        self.target = target
        self.shared = SharedDecoder(target, limits=Limits(**limits), prefixes=prefixes)
        self.ends: SimpleQueue[Ticket] = SimpleQueue()
        self.each: Callable[[int], object] = lambda step: None
        self.steps = 0
        self.go = threading.Event()
        honest = self.shared.scheduler.plan

        def plan(running: Seq[Ticket]) -> Any:
            self.go.wait(30)
            self.each(self.steps)
            self.steps += 1
            return honest(running)

        self.shared.scheduler.plan = plan  # type: ignore[method-assign]

    def _listen(self, ticket: Ticket, piece: str | None) -> None:
        if piece is None:
            self.ends.put(ticket)

    def submit(self, *requests: Request) -> list[Ticket]:
        return self.shared.submit([(one, self._listen) for one in requests])

    def ended(self, tickets: Seq[Ticket]) -> None:
        """Wait for the end of all; each is told once."""
        self.go.set()
        told = [self.ends.get(timeout=30) for _ in tickets]
        assert {*map(id, told)} == {*map(id, tickets)}
        thread = self.shared._thread
        if thread is not None:
            thread.join(30)
        assert self.ends.empty()
        assert (self.shared.running, self.shared.waiting) == ([], [])
        assert self.target.held == {}, "K/V that nobody closed"


PROMPTS = [(1, 2, 3), (4, 4), (5, 6, 7, 8), (2, 2, 9)]


def requests(method: Method, **about: Any) -> list[Request]:
    return [Request(one, method, SamplingParams(), TOKENS, **about) for one in PROMPTS]


def answers(method: Method) -> list[list[int]]:
    run = Run(table())
    tickets = run.submit(*requests(method))
    run.ended(tickets)
    return [one.finished().tokens for one in tickets]


@pytest.mark.parametrize("where", ["prefill", "score", "commit", "propose", "observe", "lend", "keep"])
def test_a_defect_fails_its_requests_and_frees_what_they_held(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    made, drafter = holding()
    target = table()
    prefixes = PrefixCache(target, 1 << 20)
    run = Run(target, prefixes if where in ("lend", "keep") else None, max_batch=3)
    owner: Any = {"lend": prefixes, "keep": prefixes, "propose": drafter, "observe": drafter}.get(where, target)
    honest, calls = getattr(owner, where), 0

    def broken(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (1 if where == "prefill" else 3):
            raise RuntimeError("a defect")
        return honest(*given, **named)

    monkeypatch.setattr(owner, where, broken)
    tickets = run.submit(*requests(made, prefix_owner="a"))
    run.ended(tickets)
    failed = [one for one in tickets if one.error is not None]
    assert 1 <= len(failed) <= 3
    for one in failed:
        with pytest.raises(RuntimeError, match="a defect"):
            one.finished()
    expected = answers(made)
    for at, one in enumerate(tickets):
        assert one in failed or one.finished().tokens == expected[at]
    assert drafter.held == []


@pytest.mark.parametrize("lack", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_beginning_that_cannot_be_kept_costs_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch, lack: BaseException
) -> None:
    made, drafter = holding()
    target = table()
    run = Run(target, PrefixCache(target, 1 << 20))

    def broken(*given: Any) -> Any:
        raise lack

    monkeypatch.setattr(target, "kv_block", broken)
    for _ in range(2):
        tickets = run.submit(*requests(made, prefix_owner="a"))
        run.ended(tickets)
        assert [one.finished().tokens for one in tickets] == answers(made)
    assert drafter.held == []


@pytest.mark.parametrize("step", [0, 1, 2, 5, 12, 20])
def test_cancelling_frees_everything_at_any_point(step: int) -> None:
    """While it waits, is read, is decoded, or waits again for lack of memory."""
    made, drafter = holding()
    run = Run(table(), max_batch=3, kv_bytes=2 * 10 * (40 + ROUND_ROWS), prefill_rows=2)
    tickets: list[Ticket] = []

    def cancel(now: int) -> None:
        if now == step:
            for one in tickets:
                one.cancel()
            run.each = over.append

    over: list[int] = []
    run.each = cancel
    tickets += run.submit(*requests(made))
    run.ended(tickets)
    assert {one.finished().finish_reason for one in tickets} <= {"cancelled", "length"}
    assert [one.finished().finish_reason for one in tickets].count("cancelled") >= 2
    assert len(over) <= 1, "a request went on after the next round"
    assert drafter.held == []


@pytest.mark.parametrize("phase", ["waiting", "reading", "decoding", "waiting again"])
def test_a_time_limit_ends_a_request_in_every_phase(phase: str) -> None:
    made, drafter = holding()
    run = Run(table(), max_batch=2, kv_bytes=2 * 10 * (40 + ROUND_ROWS), prefill_rows=5)
    now = 0.0
    run.shared.scheduler._clock = lambda: now
    long = Request((3,) * 30, made, SamplingParams(), TOKENS)
    wanted = replace(long, time_limit=5.0)
    others = requests(made)[: 2 if phase == "waiting" else 1]
    seen: list[str] = []

    def where() -> str:
        one = target.generation
        if target in run.shared.waiting:
            return "waiting" if one is None else "waiting again"
        if one is None or not one.prompt_read:
            return "reading"
        return "decoding"

    def look(step: int) -> None:
        nonlocal now
        if phase == "reading":  # it joins while another answer is under way, so that it is read in parts
            run.shared.scheduler.limits = Limits(max_batch=2 if step else 1)
        if step and where() == phase and not seen:
            seen.append(phase)
            now = 6.0

    run.each = look
    order = [wanted, *others] if phase == "waiting again" else [*others, wanted]
    tickets = run.submit(*order)
    target = tickets[order.index(wanted)]
    run.ended(tickets)
    assert seen == [phase]
    with pytest.raises(DeadlineExceeded):
        target.finished()
    assert [one.finished().finish_reason for one in tickets if one is not target] == ["length"] * (len(order) - 1)
    assert drafter.held == []


def test_preemption_at_every_step_changes_no_answer() -> None:
    """A bound that falls to nearly nothing for one step makes all but one wait again, wherever they are."""
    made, drafter = holding()
    expected = answers(made)
    preempted = 0
    for at in range(0, 40, 3):
        run = Run(table(), prefill_rows=1)
        run.each = lambda step, run=run, at=at: setattr(  # type: ignore[misc]
            run.shared.scheduler, "limits", Limits(kv_bytes=10 * (80 + ROUND_ROWS) if step == at else None)
        )
        tickets = run.submit(*requests(made))
        run.ended(tickets)
        assert [one.finished().tokens for one in tickets] == expected
        assert drafter.held == []
        preempted += sum(one.finished().metrics.preemptions for one in tickets)
    assert preempted > 10


def test_a_defect_of_the_scheduler_or_of_a_drafters_end_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    made, drafter = holding()
    run = Run(table(), max_batch=2, kv_bytes=2 * 10 * (40 + ROUND_ROWS))
    honest = drafter.end
    calls = 0

    def broken(step: int) -> None:
        if step == 10:
            raise RuntimeError("no plan")

    def end(state: DraftState) -> None:
        nonlocal calls
        calls += 1
        honest(state)
        if calls == 1:
            raise RuntimeError("no end")

    run.each = broken
    tickets = run.submit(*requests(made))
    run.ended(tickets)
    assert [str(one.error) for one in tickets] == ["no plan"] * 4
    monkeypatch.setattr(drafter, "end", end)
    run.each = lambda step: None
    tickets = run.submit(*requests(made))
    run.ended(tickets)
    assert "no end" in [str(one.error) for one in tickets]
    assert drafter.held == []
    tickets = run.submit(*requests(made))
    run.ended(tickets)
    assert [one.finished().finish_reason for one in tickets] == ["length"] * 4


def test_a_listener_that_fails_is_told_of_the_end() -> None:
    """What waits for the end of an answer waits for ever otherwise."""
    shared = SharedDecoder(table())
    told: SimpleQueue[Ticket] = SimpleQueue()

    def listen(ticket: Ticket, piece: str | None) -> None:
        if piece is not None:
            raise ValueError("a defect")
        told.put(ticket)

    [ticket] = shared.submit([(requests(holding()[0])[0], listen)])
    assert told.get(timeout=30) is ticket
    with pytest.raises(ValueError, match="a defect"):
        ticket.finished()


def test_cached_blocks_may_leave_while_a_request_goes_on_from_them() -> None:
    made, _ = holding()
    target = table()
    prefixes = PrefixCache(target, 1 << 20)
    run = Run(target, prefixes)
    prompt = tuple(1 + at % 9 for at in range(100))
    one = Request(prompt, made, SamplingParams(), TOKENS, prefix_owner="a")
    [first] = run.submit(one)
    run.ended([first])
    begun = run.steps

    def evict(step: int) -> None:
        if step > begun:  # it was admitted, with the blocks
            prefixes.shrink(0)
            prefixes.forget("a")

    run.each = evict
    [again] = run.submit(one)
    run.ended([again])
    assert again.finished().metrics.cached_tokens == 96
    assert again.finished().tokens == first.finished().tokens


def test_equal_beginnings_that_end_together_are_kept_once() -> None:
    made, _ = holding()
    target = table()
    prefixes = PrefixCache(target, 1 << 20)
    run = Run(target, prefixes)
    prompt = tuple(1 + at % 9 for at in range(100))
    one = Request(prompt, made, SamplingParams(), TOKENS, prefix_owner="a")
    tickets = run.submit(one, one, one)
    run.ended(tickets)
    assert len({tuple(each.finished().tokens) for each in tickets}) == 1
    held = 100 + TOKENS - 1
    assert len(prefixes) == held // 32
    prefixes.shrink(0)
    assert (prefixes.bytes, len(prefixes)) == (0, 0)


def test_one_of_several_choices_is_cancelled_alone() -> None:
    made, drafter = holding()
    expected = answers(made)
    run = Run(table(), max_batch=4)
    tickets = run.submit(*requests(made))

    def cancel(step: int) -> None:
        if step == 5:
            tickets[1].cancel()

    run.each = cancel
    run.ended(tickets)
    assert [one.finished().finish_reason for one in tickets] == ["length", "cancelled", "length", "length"]
    assert [one.finished().tokens for at, one in enumerate(tickets) if at != 1] == [expected[at] for at in (0, 2, 3)]
    assert drafter.held == []


def test_an_urgent_request_is_never_preempted_for_lesser_ones() -> None:
    made, _ = holding()
    run = Run(table(), kv_bytes=2 * 10 * (40 + ROUND_ROWS))
    *lesser, last = requests(made)
    urgent = replace(last, priority=5)
    tickets = run.submit(*lesser, urgent)
    run.ended(tickets)
    assert sum(one.finished().metrics.preemptions for one in tickets) > 0
    assert tickets[-1].finished().metrics.preemptions == 0
    ended = [one.timeline[-1][1] for one in tickets]
    assert ended[-1] == min(ended)

"""A state machine of requests that come, are cancelled, time out, break or are preempted, over a pretended target.

After every step: no more K/V are held than the bound allows, each by a request that runs or by the cache of prompts;
every request waits, runs, or was told of its end, once. At the end all have ended, greedy answers are those of a
request alone, and nothing is held.
"""

from __future__ import annotations

import threading
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import support
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.request import Request
from outpace.engine.scheduler import ROUND_ROWS, DeadlineExceeded, Limits, QueueFull
from outpace.engine.shared_decoder import SharedDecoder, Ticket
from support import CERTAIN_TREE, Releasing, certain_tree

VOCAB, EACH = 11, 10
STARTS = [tuple(1 + (at * at + start) % 9 for at in range(70)) for start in range(3)]
METHODS = [support.method(None), support.method(certain_tree(5, VOCAB), CERTAIN_TREE)]
_ALONE: dict[tuple[tuple[int, ...], int], list[int]] = {}


def table() -> Releasing:
    target = Releasing(VOCAB, seed=3, context_length=400)
    target.kv_bytes_per_token = EACH
    return target


def alone(request: Request) -> list[int]:
    """The answer of a request that nothing runs beside."""
    key = request.prompt, request.max_new_tokens
    if key not in _ALONE:
        decoder = Decoder(table())
        one = decoder.submit(Request(request.prompt, METHODS[0], max_new_tokens=request.max_new_tokens))
        decoder.run()
        _ALONE[key] = one.tokens
    return _ALONE[key]


class Scheduling(RuleBasedStateMachine):
    """Steps are taken by hand; the clock stands still unless it is moved."""

    @initialize(
        batch=st.integers(1, 4), queue=st.integers(0, 6), room=st.integers(160, 700), rows=st.sampled_from([1, 7, 64])
    )
    def begin(self, batch: int, queue: int, room: int, rows: int) -> None:
        self.target = table()
        self.bound = EACH * (room + ROUND_ROWS)
        self.prefixes = PrefixCache(self.target, self.bound // 2)
        limits = Limits(max_batch=batch, max_queue=queue, kv_bytes=self.bound, prefill_rows=rows)
        self.shared = SharedDecoder(self.target, limits=limits, prefixes=self.prefixes)
        self.shared.scheduler._clock = lambda: self.now
        self.now = 0.0
        self.decoder = Decoder(self.target, None, self.prefixes)
        self.tickets: list[Ticket] = []
        self.told: list[Ticket] = []
        self.breaking = False
        honest = self.target.score

        def score(*given: Any, **named: Any) -> Any:
            if self.breaking:
                self.breaking = False
                raise RuntimeError("a defect")
            return honest(*given, **named)

        self.target.score = score  # type: ignore[method-assign]

    def _listen(self, ticket: Ticket, piece: str | None) -> None:
        if piece is None:
            self.told.append(ticket)

    @rule(
        start=st.sampled_from(STARTS),
        cut=st.sampled_from([1, 2, 33, 40, 65, 70]),
        length=st.sampled_from([1, 3, 30, 60, 90]),
        method=st.sampled_from(METHODS),
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 1),
        limited=st.booleans(),
        cached=st.booleans(),
        many=st.integers(1, 3),
    )
    def submit(
        self, start: tuple[int, ...], cut: int, length: int, method: Any, tenant: str, priority: int, limited: bool,
        cached: bool, many: int,
    ) -> None:  # fmt: skip
        limit, owner = 50.0 if limited else None, tenant if cached else None
        one = Request(start[:cut], method, SamplingParams(), length, tenant=tenant, priority=priority,
                      time_limit=limit, prefix_owner=owner)  # fmt: skip
        waiting = self.shared.waiting
        self.shared._thread = threading.current_thread()  # it takes the steps itself
        try:
            self.tickets += self.shared.submit([(one, self._listen)] * many)
        except QueueFull:
            assert self.shared.waiting == waiting

    @rule(count=st.sampled_from([1, 2, 5, 20, 100]))
    def step(self, count: int) -> None:
        for _ in range(count):
            following = self.shared._advance(self.decoder)
            if following is None:
                assert not self.shared.running
                return
            self.decoder = following
            self.held_is_within_bounds()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Who is cancelled is gone after the next step."""
        one = data.draw(st.sampled_from(self.tickets))
        one.cancel()
        for _ in range(2 if one in self.shared.running else 1):
            self.step(1)
        assert one in self.told

    @rule()
    def time_passes(self) -> None:
        self.now += 30

    @rule()
    def a_step_breaks(self) -> None:
        self.breaking = bool(self.shared.running)
        self.step(1)

    @rule(batch=st.integers(1, 4))
    def bounds_change(self, batch: int) -> None:
        before = self.shared.limits
        self.shared.limits = Limits(batch, before.max_queue, before.kv_bytes, before.prefill_rows)

    @invariant()
    def held_is_within_bounds(self) -> None:
        if not hasattr(self, "shared"):
            return
        running = [one.generation for one in self.shared.running if one.generation is not None]
        assert {id(one.sequence.kv) for one in running} == set(self.target.held)
        used = sum(self.target.kv_bytes(one.sequence.kv) for one in running)
        assert used <= self.shared.kv_bytes or not running
        assert max(used, self.shared.kv_bytes) + self.prefixes.bytes <= self.bound
        blocks = self.prefixes._recent
        assert self.prefixes.bytes == sum(one.bytes for one in blocks)
        everybody = [*self.shared.running, *self.shared.waiting, *self.told]
        assert sorted(map(id, everybody)) == sorted(map(id, self.tickets))

    def teardown(self) -> None:
        if not hasattr(self, "shared"):
            return
        self.breaking = False
        for _ in range(3000):
            following = self.shared._advance(self.decoder)
            if following is None:
                break
            self.decoder = following
            self.held_is_within_bounds()
        assert len(self.told) == len(self.tickets)
        assert self.target.held == {}
        for one in self.tickets:
            self._check(one)
        self.prefixes.shrink(0)
        assert (self.prefixes.bytes, self.prefixes._roots) == (0, {})

    def _check(self, one: Ticket) -> None:
        if one.error is not None:
            assert str(one.error) == "a defect" or isinstance(one.error, DeadlineExceeded)
            return
        assert one.generation is not None
        if one.generation.error is not None:
            assert isinstance(one.generation.error, DeadlineExceeded)
            return
        expected, found = alone(one.request), one.generation.tokens
        assert found == expected[: len(found)]
        if one.generation.finish_reason != "cancelled" and len(found) < len(expected):
            # It needed all the memory that there is, alone.
            rows = len(one.request.prompt) + len(found) + ROUND_ROWS
            assert one.generation.finish_reason == "length"
            assert EACH * (rows + ROUND_ROWS) > self.bound


Scheduling.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestScheduling = Scheduling.TestCase

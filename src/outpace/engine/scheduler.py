"""Scheduler: which requests run, which wait, and how much of their prompts the next step reads.

The decoder does what the scheduler plans, step by step:

- **Admission.** At most ``max_batch`` requests run, and never more than ``kv_bytes`` of K/V are held. One that outgrows
  the bound makes the least important, newest other request wait again; its K/V is computed anew when it is its turn,
  and its answer goes on where it stopped.
- **Order.** Higher ``priority`` first; then the tenant that has been served least, by the virtual token counter of
  Sheng et al. 2024 (arXiv 2401.00588, algorithm 2: prompt tokens count 1, output tokens 2); then by arrival.
- **Chunked prefill** (Agrawal et al. 2023, arXiv 2308.16369). While answers are under way, a step reads only as many
  rows of new prompts as the target computes at nearly its best rate, so that a long prompt does not hold them up.
- **Bounds.** A full queue refuses (:class:`QueueFull`), and a request that exceeds its time limit ends with
  :class:`DeadlineExceeded`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from outpace.core.errors import BadInput, OutpaceError
from outpace.engine.populations.group import most_tokens
from outpace.engine.request import Request
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from outpace.engine.shared_decoder import Ticket

ROUND_ROWS = 64
"""Tokens that a round may add to a sequence, for which there must be room."""
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""What a token counts for in a tenant's service."""
WHOLE_CHUNK = 512
"""Rows of prompts in a step in which nothing is decoded."""
_CHUNKS = (16, 32, 64, 128, 256, 512)
_NEAR = 1.1
"""A chunk's time per row, as a multiple of the lowest, at which it is large enough."""


NOBODY: Mapping[str, int] = {}
"""Calls in preparation, where there are none."""


class QueueFull(OutpaceError):
    """No room for another request now. ``retry_after``: seconds after which there probably is."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests are waiting, which is the limit; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class DeadlineExceeded(OutpaceError):
    """A request took longer than its time limit, of ``limit`` seconds."""

    def __init__(self, limit: float) -> None:
        super().__init__(f"the request took longer than its limit of {limit:g} s")


class Closed(OutpaceError):
    """The decoder takes no more requests: it is being shut down."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one decoder. ``kv_bytes``: of K/V in all, cached beginnings included; None: no bound.

    ``max_queue``: requests that may wait; None: any number. ``prefill_rows``: rows of prompts that a step reads while
    answers are under way; None: as measured.
    """

    max_batch: int = 8
    max_queue: int | None = None
    kv_bytes: int | None = None
    prefill_rows: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_queue", 0), ("kv_bytes", 1), ("prefill_rows", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInput(f"{name} must be at least {least}, not {value}")


@dataclass(slots=True)
class Plan:
    """What the next step does. ``overdue`` end with an error; ``full`` end, as there is no room for another token."""

    admit: list[Ticket] = field(default_factory=list)
    preempt: list[Ticket] = field(default_factory=list)
    overdue: list[Ticket] = field(default_factory=list)
    full: list[Ticket] = field(default_factory=list)
    decoding: bool = False
    """Whether answers are under way that a long prompt would hold up."""
    kv_bytes: int = 0
    """Bytes of K/V that may be held when the step has ended, by those that then run."""


class Scheduler:
    """Keeps the queue and plans steps. Not safe for threads: the decoder that owns it has a lock."""

    def __init__(self, target: Target, limits: Limits | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self.limits = limits or Limits()
        self._target = target
        self._clock = clock
        self._service: dict[str, float] = {}
        self._spent: deque[float] = deque(maxlen=32)
        self._chunk: int | None = None
        self.waiting: list[Ticket] = []

    # --------------------------------------------------------------------------------------------- requests

    def check(self, request: Request) -> None:
        """Raise BadInput for a request whose prompt alone exceeds the bound on K/V, and for one whose group would:
        its answers are complete or none, while a single answer may end where there is no more room."""
        bound, needed = self.limits.kv_bytes, self._bytes(request)
        if bound is None:
            return
        population = request.population
        if population is not None:
            tokens = most_tokens(request, self._target)
            each = self._target.kv_bytes(None, tokens + ROUND_ROWS)
            whole = self._target.kv_bytes(None, len(request.prompt) + ROUND_ROWS) + population.size * each
            if whole > bound:
                raise BadInput(
                    f"{population.size} {population.called} of {tokens:,} tokens would take {whole:,} bytes of K/V; "
                    f"the bound is {bound:,}. Lower their number or max_tokens, or raise the bound"
                )
        if needed > bound:
            raise BadInput(
                f"the prompt has {len(request.prompt)} tokens, whose K/V would take {needed:,} bytes; the bound is "
                f"{bound:,}. Shorten the prompt, or raise the bound"
            )

    def check_room(
        self, count: int, running: Seq[Ticket], tenant: str = "", preparing: Mapping[str, int] = NOBODY
    ) -> None:
        """Raise QueueFull where so many more requests of ``tenant`` could not wait now.

        ``preparing``: calls, by tenant, that will ask for room themselves. A tenant that has nothing here may go beyond
        the bound by a batch: else whoever fills the queue would lock everybody else out.
        """
        most = self.limits.max_queue
        if most is None:
            return
        waiting = len(self.waiting) + sum(preparing.values())
        free = max(0, self.limits.max_batch - len(running)) if not self.waiting else 0
        present = {one.request.tenant for one in (*self.waiting, *running)} | set(preparing)
        beside = self.limits.max_batch if present and tenant not in present else 0
        if waiting + count > most + free + beside:
            raise QueueFull(waiting, self.retry_after())

    def add(self, tickets: Seq[Ticket], running: Seq[Ticket]) -> None:
        """Let requests wait for their turn. Raises QueueFull, and then none of them waits."""
        self.check_room(len(tickets), running, tickets[0].request.tenant if tickets else "")
        if not self.waiting and not running:
            # Nobody is there: nobody is owed anything. A tenant that was served alone for a day must not wait for as
            # long when another comes.
            self._service.clear()
        present = {one.request.tenant for one in (*self.waiting, *running)}
        for ticket in tickets:
            tenant = ticket.request.tenant
            if tenant not in present:
                # Who was away is not repaid for it: the counter is lifted to that of the least served.
                least = min((self._service.get(one, 0.0) for one in present), default=0.0)
                self._service[tenant] = max(self._service.get(tenant, 0.0), least)
                present.add(tenant)
            ticket.arrived = self._clock()
            self.waiting.append(ticket)

    def again(self, ticket: Ticket) -> None:
        """A preempted request waits for its turn, in the place that its arrival gives it."""
        self.waiting.append(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """A request no longer waits, if it did."""
        if ticket in self.waiting:
            self.waiting.remove(ticket)

    def served(self, tenant: str, prompt: int, output: int) -> None:
        """A tenant's requests had so many rows of prompts read, and so many tokens committed."""
        self._service[tenant] = self._service.get(tenant, 0.0) + PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output

    def ended(self, ticket: Ticket) -> None:
        """A request ended; how long it took tells when there is room in a full queue."""
        self._spent.append(self._clock() - ticket.arrived)

    def retry_after(self) -> float:
        """Seconds in which about one request leaves."""
        if not self._spent:
            return 1.0
        return max(1.0, math.ceil(sum(self._spent) / len(self._spent) / self.limits.max_batch))

    # ------------------------------------------------------------------------------------------------- plans

    def plan(self, running: Seq[Ticket]) -> Plan:
        """The next step. ``running``: those that were admitted and have not ended."""
        plan = Plan()
        now = self._clock()
        for one in (*running, *self.waiting):
            limit = one.request.time_limit
            if limit is not None and now - one.arrived > limit:
                plan.overdue.append(one)
        stay = [one for one in running if one not in plan.overdue]
        for one in plan.overdue:
            self.withdraw(one)
        plan.kv_bytes = sum(self._held(one) for one in stay)
        self._make_room(plan, stay)
        self._admit(plan, stay)
        plan.decoding = any(self._decoding(one) for one in stay)
        return plan

    def _make_room(self, plan: Plan, stay: list[Ticket]) -> None:
        bound = self.limits.kv_bytes
        while bound is not None and plan.kv_bytes > bound and stay:
            last = min(stay, key=lambda one: (one.request.priority, -one.arrived))
            stay.remove(last)
            plan.kv_bytes -= self._held(last)
            (plan.preempt if stay else plan.full).append(last)

    def _admit(self, plan: Plan, stay: Seq[Ticket]) -> None:
        if plan.preempt:
            return
        bound = self.limits.kv_bytes
        count = len(stay)
        service = dict(self._service)
        while self.waiting and count < self.limits.max_batch:
            first = min(self.waiting, key=lambda one: self._rank(one, service))
            needed = self._held(first)
            if bound is not None and count and plan.kv_bytes + needed > bound:
                return  # nobody overtakes it: it would wait forever
            self.waiting.remove(first)
            plan.admit.append(first)
            plan.kv_bytes += needed
            count += 1
            # Requests admitted together count before they have been served.
            service[first.request.tenant] = service.get(first.request.tenant, 0.0) + len(first.request.prompt)

    @staticmethod
    def _rank(one: Ticket, service: dict[str, float]) -> tuple[float, ...]:
        return -one.request.priority, service.get(one.request.tenant, 0.0), one.arrived

    def _held(self, one: Ticket) -> int:
        """Bytes of K/V of a request after its next round."""
        generation = one.generation
        if generation is None:
            return self._bytes(one.request)
        if generation.group is None:
            return self._grown(generation.sequence)
        # Also where they have no K/V now: a group that was preempted computes that of all its tokens anew.
        members = [self._grown(member.sequence) for member in generation.group.members]
        born = max(0, generation.group.population.size - len(members))
        return self._grown(generation.sequence) + sum(members) + born * max(members, default=0)

    def _grown(self, sequence: Sequence) -> int:
        """Bytes of K/V of a sequence after its next round."""
        kv, tokens = sequence.kv, len(sequence.tokens)
        missing = tokens if kv is None else tokens - self._target.length(kv)
        return self._target.kv_bytes(kv, missing + ROUND_ROWS)

    def _bytes(self, request: Request) -> int:
        population = request.population
        sequences = 1 if population is None else 1 + population.size
        return sequences * self._target.kv_bytes(None, len(request.prompt) + ROUND_ROWS)

    def _decoding(self, one: Ticket) -> bool:
        """Whether all of its prompt has been read."""
        sequence = None if one.generation is None else one.generation.sequence
        return sequence is not None and self._target.length(sequence.kv) >= len(sequence.tokens) - 1

    def rows_beside(self) -> int:
        """Rows of prompts that a step reads while answers are under way: the fewest that take nearly the least time
        each. Fewer would waste time, more would delay answers. May measure the target."""
        if self.limits.prefill_rows is not None:
            return self.limits.prefill_rows
        if self._chunk is None:
            each = {rows: self._target.costs.seconds(rows) / rows for rows in _CHUNKS}
            self._chunk = next(rows for rows in _CHUNKS if each[rows] <= _NEAR * min(each.values()))
        return self._chunk

"""The server, simulated: the scheduler of `outpace serve` plans, and steps take what a machine says.

Requests arrive, wait, are admitted, have their prompts read in chunks and run in rounds with all others, exactly as
:class:`~outpace.engine.shared_decoder.SharedDecoder` does it: the same :class:`~outpace.engine.scheduler.Scheduler`
decides, on a simulated clock. Only forwards, drafts and tokens are not computed.

With pipeline parallelism there are as many such servers as stages, each with its share of the batch and of the K/V,
whose forwards follow one another through the stages; a request stays with the server that had fewest when it came.
Drafting holds the first stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from outpace.engine.reading_order import ReadingOrder
from outpace.engine.scheduler import WHOLE_CHUNK, Limits, Plan, Scheduler
from outpace.simulate.acceptance import SimulatedRound
from outpace.simulate.draft_times import DraftTimes
from outpace.simulate.machines import LengthsOnly, Machine
from outpace.traces.trace_format import BLOCK, TracedRequest

if TYPE_CHECKING:
    import simpy

_KV_SHARE = 0.5
"""Of the K/V that a server may hold: for cached beginnings of prompts, as `outpace serve` has it."""


@dataclass(eq=False, slots=True)
class Held:
    """K/V of ``rows`` tokens."""

    rows: int


@dataclass(eq=False, slots=True)
class _Tokens:
    """A sequence of which only the length is known."""

    count: int
    kv: Held | None

    @property
    def tokens(self) -> range:
        return range(self.count)


@dataclass(eq=False, slots=True)
class _Running:
    sequence: _Tokens
    group: None = None


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """A request on its way, with what the scheduler reads of a ticket. Times are those of the simulated clock."""

    traced: TracedRequest
    rounds: Iterator[SimulatedRound]
    ended: Any = None
    """The event that is triggered at its end."""
    tenant: str = ""
    priority: int = 0
    time_limit: float | None = None
    arrived: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    committed: int = 0
    first_tokens: int = 0
    """Those of the first round that had any."""
    drafted: int = 0
    round_count: int = 0
    cached: int = 0
    preemptions: int = 0
    generation: _Running | None = None
    population: None = None
    """Simulated requests own one sequence."""
    prompt: range = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = range(self.traced.prompt_tokens)

    @property
    def request(self) -> SimulatedRequest:
        return self

    @property
    def sequence(self) -> _Tokens:
        assert self.generation is not None
        return self.generation.sequence

    @property
    def unread(self) -> int:
        """Tokens without K/V; the last one is scored by the next round."""
        sequence = self.sequence
        return 0 if sequence.kv is None else max(0, sequence.count - 1 - sequence.kv.rows)


@dataclass(slots=True)
class Counters:
    """What all servers have done so far."""

    forwards: int = 0
    rows: int = 0
    prompt_rows: int = 0
    cached_rows: int = 0
    requests_in_rounds: int = 0
    draft_seconds: float = 0.0
    ended: int = 0
    """Requests."""
    queued: int = 0
    """Requests that the scheduler has looked at, which is what a simulation of a long queue takes its time for."""
    busy: list[float] = field(default_factory=list)
    """Seconds that each stage has worked."""


class Prefixes:
    """Which beginnings of prompts are cached: ``most`` blocks, the least recently used leave first.

    ``block_bytes``: of K/V; 0 where nobody counts them. ``servers``: that share the cache.
    """

    def __init__(self, most: int, block_bytes: int = 0, servers: int = 1) -> None:
        self._most, self._block_bytes, self._servers = most, block_bytes, servers
        self._known: OrderedDict[str, None] = OrderedDict()

    def lend(self, one: TracedRequest) -> int:
        """Tokens of its prompt that need not be read; its last token is always scored."""
        found = 0
        for name in one.prefix:
            if name not in self._known or (found + 1) * BLOCK >= one.prompt_tokens:
                break
            found += 1
        for name in reversed(one.prefix[:found]):
            self._known.move_to_end(name)
        return found * BLOCK

    def shrink(self, free: int) -> None:
        """Keep what fits in the memory that running requests leave: ``free`` bytes of each server."""
        if self._block_bytes:
            most = max(0, free) * self._servers // self._block_bytes
            while len(self._known) > most:
                self._known.popitem(last=False)

    def keep(self, one: TracedRequest) -> None:
        """Its prompt has been read."""
        for name in reversed(one.prefix[: (one.prompt_tokens - 1) // BLOCK]):
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


class Server:
    """One decoder and its scheduler. ``stages``: resources that its forwards go through, one after the other."""

    def __init__(
        self,
        env: simpy.Environment,
        machine: Machine,
        drafts: DraftTimes,
        stages: Seq[simpy.Resource],
        limits: Limits,
        prefixes: Prefixes | None,
        counters: Counters,
    ) -> None:
        self.env, self.machine, self.drafts, self.stages = env, machine, drafts, stages
        self.prefixes, self.counters = prefixes, counters
        self.scheduler = Scheduler(cast(Any, LengthsOnly(machine)), limits, self._now)
        self.running: list[SimulatedRequest] = []
        self._order = ReadingOrder()
        self._wake = env.event()
        env.process(self._work())

    def _now(self) -> float:
        return float(self.env.now)

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self.running) + len(self.scheduler.waiting)

    def submit(self, one: SimulatedRequest) -> None:
        """A request arrives. Raises QueueFull."""
        self.counters.queued += self.load
        self.scheduler.add([cast(Any, one)], cast(Any, self.running))
        if not self._wake.triggered:
            self._wake.succeed()

    def _work(self) -> Iterator[Any]:
        while True:
            if not self.load:
                self._wake = self.env.event()
                yield self._wake
                continue
            plan = self.scheduler.plan(cast(Any, self.running))
            self.counters.queued += len(plan.admit) * len(self.scheduler.waiting)
            self._follow(plan)
            if self.prefixes is not None and (bound := self.scheduler.limits.kv_bytes) is not None:
                self.prefixes.shrink(bound - plan.kv_bytes)
            yield from self._read_prompts(self.scheduler.rows_beside() if plan.decoding else WHOLE_CHUNK)
            ready = [one for one in self.running if not one.unread]
            if ready:
                yield from self._round(ready)

    def _follow(self, plan: Plan) -> None:
        for one in cast("list[SimulatedRequest]", plan.full):  # alone, and its K/V outgrows the bound
            self._end(one)
        for one in cast("list[SimulatedRequest]", plan.preempt):
            one.sequence.kv = None
            one.preemptions += 1
            self.running.remove(one)
            self.scheduler.again(cast(Any, one))
        for one in cast("list[SimulatedRequest]", plan.admit):
            found = 0 if self.prefixes is None else self.prefixes.lend(one.traced)
            if one.generation is None:
                one.admitted, one.cached = self.env.now, found
                self.counters.cached_rows += found
                one.generation = _Running(_Tokens(one.traced.prompt_tokens, None))
            one.sequence.kv = Held(found)
            self.running.append(one)

    def _read_prompts(self, most: int) -> Iterator[Any]:
        """At most ``most`` rows of prompts, in one forward."""
        reading = [one for one in self.running if one.unread]
        if not reading:
            return
        pieces: list[tuple[SimulatedRequest, int]] = []
        for one in self._order.next(reading, lambda one: one.unread):
            if rows := min(one.unread, most):
                pieces.append((one, rows))
                most -= rows
        held = [cast(Held, one.sequence.kv) for one, _ in pieces]
        contexts = [kv.rows for kv in held]
        first, *others = self.machine.chunk([rows for _, rows in pieces], contexts)
        read = zip(pieces, contexts, strict=True)
        drafters = sum(self.drafts.reading(one.traced.method, rows, context) for (one, rows), context in read)
        yield from self._pass([first + drafters, *others])
        for (one, rows), kv in zip(pieces, held, strict=True):
            kv.rows += rows
            self.counters.prompt_rows += rows
            self.scheduler.served(one.tenant, rows, 0)
            if not one.unread and self.prefixes is not None:
                self.prefixes.keep(one.traced)

    def _round(self, ready: Seq[SimulatedRequest]) -> Iterator[Any]:
        rounds = [next(one.rounds) for one in ready]
        contexts = [one.sequence.count - 1 for one in ready]
        drafting: dict[str, list[SimulatedRound]] = {}
        for one, each in zip(ready, rounds, strict=True):
            drafting.setdefault(one.traced.method, []).append(each)
        context = sum(contexts) // len(contexts)
        spent = sum(self.drafts.seconds(method, some, context) for method, some in drafting.items())
        first, *others = self.machine.round([1 + one.drafted for one in rounds], contexts)
        yield from self._pass([spent + first, *others])
        self.counters.forwards += 1
        self.counters.rows += sum(1 + one.drafted for one in rounds)
        self.counters.requests_in_rounds += len(rounds)
        self.counters.draft_seconds += spent
        for one, each in zip(ready, rounds, strict=True):
            self._commit(one, each)
        if (gap := self.machine.between(len(ready))) > 0.0:
            yield self.env.timeout(gap)

    def _commit(self, one: SimulatedRequest, each: SimulatedRound) -> None:
        sequence = one.sequence
        sequence.count += each.committed
        sequence.kv = Held(sequence.count - 1)
        one.committed += each.committed
        one.drafted += each.drafted
        one.round_count += 1
        self.scheduler.served(one.tenant, 0, each.committed)
        if one.first_token is None and each.committed:
            one.first_token, one.first_tokens = self.env.now, each.committed
        if one.committed >= one.traced.output_tokens:
            self._end(one)

    def _end(self, one: SimulatedRequest) -> None:
        one.finished = self.env.now
        self.counters.ended += 1
        self.running.remove(one)
        self.scheduler.ended(cast(Any, one))
        if one.ended is not None:
            one.ended.succeed()

    def _pass(self, seconds: Seq[float]) -> Iterator[Any]:
        """Through all stages; each works for one forward at a time."""
        for number, (stage, each) in enumerate(zip(self.stages, seconds, strict=True)):
            with stage.request() as turn:
                yield turn
                yield self.env.timeout(each)
            self.counters.busy[number] += each


def servers(
    env: simpy.Environment, machine: Machine, drafts: DraftTimes, limits: Limits, *, prefix_cache: bool = True
) -> tuple[list[Server], Counters]:
    """The servers of a machine, one for each stage, within ``limits`` together."""
    import simpy

    count = machine.stages
    stages = [simpy.Resource(env, capacity=1) for _ in range(count)]
    counters = Counters(busy=[0.0] * count)
    kv = limits.kv_bytes if limits.kv_bytes is not None else machine.kv_capacity
    each = Limits(
        max_batch=max(1, -(-limits.max_batch // count)),
        max_queue=limits.max_queue,
        kv_bytes=None if kv is None else max(1, kv // count),
        prefill_rows=limits.prefill_rows,
    )
    blocks, block_bytes = 1 << 20, machine.kv_bytes_per_token * BLOCK
    if kv is not None and block_bytes:
        blocks = int(kv * _KV_SHARE) // block_bytes
    prefixes = Prefixes(blocks, block_bytes, count) if prefix_cache else None
    return [Server(env, machine, drafts, stages, each, prefixes, counters) for _ in range(count)], counters

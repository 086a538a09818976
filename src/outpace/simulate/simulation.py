"""One simulation: a method's requests, a load, a machine; and what comes of them.

A load that a machine cannot take never drains: the simulated time and the number of forwards are bounded, and the
outcome says what was left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outpace.core.errors import MissingExtra
from outpace.core.metrics import ratio
from outpace.engine.scheduler import Limits
from outpace.simulate.acceptance import Acceptance
from outpace.simulate.draft_times import DraftTimes
from outpace.simulate.load import Arrivals, Load
from outpace.simulate.machines import Machine
from outpace.simulate.serving_model import Counters, Server, SimulatedRequest, servers
from outpace.traces.trace_format import TracedRequest

HOURS = 24.0
"""Of simulated time, at most, where no other bound is given."""
FORWARDS = 2_000_000
"""At most, after which a simulation ends: about a minute of this program's time."""
QUEUED = 50_000_000
"""Looks of the scheduler at requests that wait or run, at most: as long."""
_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class Outcome:
    """What came of one simulation. ``waiting``: how many waited when the last request arrived. ``bound``:
    the bound that ended it before all were answered; "": none."""

    requests: Seq[SimulatedRequest]
    counters: Counters
    seconds: float
    waiting: int
    bound: str = ""
    watts: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def answered(self) -> list[SimulatedRequest]:
        return [one for one in self.requests if one.finished is not None]

    def public(self) -> dict[str, Any]:
        """The figures, under the names of docs/metrics.md where these have one. Times to the first token and of whole
        requests are counted from the arrival."""
        done, counters = self.answered, self.counters
        tokens = sum(one.committed for one in done)
        rounds = sum(one.round_count for one in done)
        begun = [(one, one.first_token) for one in done if one.first_token is not None]  # others have no tokens
        decoding = [(one, (one.finished or 0.0) - first) for one, first in begun]
        energy = None if self.watts is None else self.watts * sum(counters.busy) / max(1, len(counters.busy))
        return {
            "requests": len(self.requests),
            "answered": len(done),
            "drained": not self.bound,
            "waiting_at_last_arrival": self.waiting,
            "seconds": self.seconds,
            "tokens": tokens,
            "tokens_per_second": ratio(tokens, self.seconds),
            "requests_per_second": ratio(len(done), self.seconds),
            "user_tokens_per_second": ratio(
                sum(one.committed - one.first_tokens for one, _ in decoding), sum(spent for _, spent in decoding)
            ),
            "mean_acceptance_length": ratio(tokens, rounds),
            "rounds": rounds,
            "drafted": sum(one.drafted for one in done),
            "forwards": counters.forwards,
            "mean_batch": ratio(counters.requests_in_rounds, counters.forwards),
            "mean_rows": ratio(counters.rows, counters.forwards),
            "prompt_rows": counters.prompt_rows,
            "cached_rows": counters.cached_rows,
            "preemptions": sum(one.preemptions for one in self.requests),
            "draft_seconds": counters.draft_seconds,
            "utilization": [ratio(busy, self.seconds) for busy in counters.busy],
            "joules_per_token": None if energy is None else ratio(energy, tokens),
            "queue_ms": _spread([1e3 * ((one.admitted or 0.0) - one.arrived) for one in done]),
            "ttft_ms": _spread([1e3 * (first - one.arrived) for one, first in begun]),
            "tpot_ms": _spread([1e3 * spent / (one.committed - 1) for one, spent in decoding if one.committed > 1]),
            "latency_ms": _spread([1e3 * ((one.finished or 0.0) - one.arrived) for one in done]),
            "notes": self.notes,
        }


def simulate_requests(
    requests: Seq[TracedRequest],
    acceptance: Acceptance,
    machine: Machine,
    drafts: DraftTimes,
    load: Load,
    limits: Limits,
    *,
    count: int | None = None,
    prefix_cache: bool = True,
    hours: float = HOURS,
    forwards: int = FORWARDS,
    on_step: Callable[[int], None] | None = None,
) -> Outcome:
    """Serve ``count`` requests (those given, over and over; None: each once), until all are answered or a bound is met.

    ``hours`` of simulated time, and ``forwards``: the bounds. ``on_step``: called with the number of forwards, now and
    then. Raises MissingExtra where simpy is not installed, and BadInput for requests that K/V cannot hold.
    """
    try:
        import simpy
    except ModuleNotFoundError:
        raise MissingExtra("outpace simulate", "simulate") from None
    env = simpy.Environment()
    groups, counters = servers(env, machine, drafts, limits, prefix_cache=prefix_cache)
    given = _repeated(requests, len(requests) if count is None else count)
    waiting = [SimulatedRequest(one, acceptance.rounds(one, number)) for number, one in enumerate(given)]
    arrived = queued = 0

    def submit(one: SimulatedRequest) -> None:
        nonlocal arrived, queued
        server: Server = min(groups, key=lambda each: each.load)
        server.scheduler.check(one)  # type: ignore[arg-type]
        server.submit(one)
        arrived += 1
        if arrived == len(waiting):
            queued = sum(len(each.scheduler.waiting) for each in groups)

    load.start(env, waiting, submit)
    end, bound, steps = 3600.0 * hours, "", 0
    while counters.ended < len(waiting):
        if env.peek() > end:
            bound = f"{hours:g} simulated hours"
        elif counters.forwards >= forwards:
            bound = f"{counters.forwards:,} forwards"
        elif counters.queued >= QUEUED:
            bound = f"{counters.forwards:,} forwards with {sum(each.load for each in groups):,} requests at once"
        if bound:
            break
        env.step()
        steps += 1
        if on_step is not None and steps % 4096 == 0:
            on_step(counters.forwards)
    last = max((one.finished for one in waiting if one.finished is not None), default=0.0)
    found = Outcome(waiting, counters, float(env.now) if bound else last, queued, bound, machine.watts)
    found.notes += _notes(found, load, limits)
    if len(given) > len(requests):
        found.notes.append(
            f"{len(given):,} requests were made of {len(requests):,}, one after another again and again; a repeated "
            "one counts as another prompt of the same length"
        )
    return found


def _repeated(requests: Seq[TracedRequest], count: int) -> list[TracedRequest]:
    """``requests`` over and over. The beginnings of a repeated request are other ones than before: nobody asks the
    same things in the same order again, and a cache that knew them would read no prompt after the first pass."""
    found = []
    for number in range(count):
        turn, at = divmod(number, len(requests))
        one = requests[at]
        found.append(replace(one, prefix=tuple(f"{turn}/{name}" for name in one.prefix)) if turn else one)
    return found


def _notes(found: Outcome, load: Load, limits: Limits) -> list[str]:
    total, done = len(found.requests), len(found.answered)
    if found.bound:
        return [
            f"the load does not drain: after {found.bound} {done} of {total} requests were answered; figures are of "
            f"these. Give a lower rate, fewer users, more devices or a larger --max-batch (now {limits.max_batch})"
        ]
    notes = []
    if isinstance(load, Arrivals) and _queued(found) and found.waiting > max(limits.max_batch, total // 10):
        notes.append(
            f"the queue was still growing when the last request arrived ({found.waiting} waited): the machine does not "
            f"keep up with this load at --max-batch {limits.max_batch}, and waiting times depend on how long it lasts"
        )
    if short := sum(one.committed < one.traced.output_tokens for one in found.answered):
        notes.append(f"{short} answers were cut short: the K/V of one request outgrew the memory")
    return notes


def _queued(found: Outcome) -> bool:
    """Whether requests arrived after the first was answered; where all came before, nothing shows what keeps up."""
    return max(one.arrived for one in found.requests) > min(one.finished or 0.0 for one in found.answered)


def _spread(values: Seq[float]) -> dict[str, float | None]:
    """Mean and quantiles."""
    if not values:
        return {"mean": None, "p50": None, "p90": None, "p99": None}
    quantiles = [float(one) for one in np.quantile(values, _QUANTILES)]
    return {"mean": float(np.mean(values)), "p50": quantiles[0], "p90": quantiles[1], "p99": quantiles[2]}

"""Loads: when requests arrive. As in the trace, at random with a rate, or from users who wait for their answers."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence as Seq
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.simulate.serving_model import SimulatedRequest
from outpace.traces.trace_format import Trace

if TYPE_CHECKING:
    import simpy

Submit = Callable[[SimulatedRequest], None]


class Load(ABC):
    """When requests arrive."""

    described: str

    @abstractmethod
    def start(self, env: simpy.Environment, requests: Seq[SimulatedRequest], submit: Submit) -> None:
        """Begin the processes that submit ``requests``, in their order."""


class Arrivals(Load):
    """Open: requests arrive at ``times`` (seconds), whatever has been answered by then."""

    def __init__(self, times: Seq[float], described: str) -> None:
        self.times, self.described = times, described

    def start(self, env: simpy.Environment, requests: Seq[SimulatedRequest], submit: Submit) -> None:
        def arrive() -> Iterator[Any]:
            for at, one in zip(self.times, requests, strict=True):
                yield env.timeout(max(0.0, at - env.now))
                submit(one)

        env.process(arrive())


class Users(Load):
    """Closed: ``count`` users, each of whom sends the next request ``pause`` seconds after the last answer: on average,
    0.5 to 1.5 times as many at random. So they fall out of step, as users do: where answers end in the same round,
    requests that came at the same moment would be read together, before any of them is answered."""

    def __init__(self, count: int, pause: float = 0.0, seed: int = 0) -> None:
        if count < 1:
            raise BadInput(f"--users must be at least 1, not {count}")
        if not 0.0 <= pause < float("inf"):
            raise BadInput(f"--pause must be at least 0 seconds, not {pause:g}")
        self.count, self.pause, self._seed = count, pause, seed
        self.described = f"{count} users, each with one request at a time"
        if pause:
            self.described += f", {pause:g} s after the last answer"

    def start(self, env: simpy.Environment, requests: Seq[SimulatedRequest], submit: Submit) -> None:
        coming, chance = iter(requests), random.Random(f"users/{self._seed}")

        def ask() -> Iterator[Any]:
            if self.pause:
                yield env.timeout(self.pause * chance.random())
            for one in coming:
                one.ended = env.event()
                submit(one)
                yield one.ended
                if self.pause:
                    yield env.timeout(self.pause * (0.5 + chance.random()))

        for _ in range(self.count):
            env.process(ask())


def poisson(rate: float, count: int, seed: int) -> Arrivals:
    """``count`` arrivals, ``rate`` a second, independent of one another. Raises BadInput for a rate of 0 or less."""
    if not 0 < rate < float("inf"):
        raise BadInput(f"--rate must be a number of requests per second above 0, not {rate:g}")
    chance, now, times = random.Random(f"arrivals/{seed}"), 0.0, []
    for _ in range(count):
        now += chance.expovariate(rate)
        times.append(now)
    return Arrivals(times, f"{rate:g} requests per second, at random (Poisson)")


def as_recorded(trace: Trace, times: Seq[float | None]) -> Load:
    """The load of the trace itself: ``times`` of its requests, or as many at once as there were."""
    known = [one for one in times if one is not None]
    if trace.header.kind == "open" and len(known) == len(times):
        first = min(known, default=0.0)
        return Arrivals([one - first for one in known], "arrivals as in the trace")
    return Users(trace.header.at_once)

"""Rounds of a constant number of requests, one at a time, with what each of them drafted, committed and took.

When a request ends the next one joins; after the last one has joined, places are kept by requests that are not counted,
until the last counted one has ended: as in ``outpace bench``, rounds are those of a batch that stays as large.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter

from outpace.core.metrics import PHASES
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request
from outpace.engine.worth_drafting import payoff_of
from outpace.targets.base import Target

UNCOUNTED = -1


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round. ``requests``: the number of each request in it, :data:`UNCOUNTED` for one that only keeps a place;
    ``drafted`` and ``committed``: its draft tokens and its tokens; ``contexts``: tokens in its K/V. ``draft_seconds``,
    and ``verify_seconds`` for all else: the forward, the rule, the commit, what lies between rounds; but for prompts
    that are read before it. Of these ``forward_seconds`` are the forward's. ``rested``: drafts did not pay in such
    rounds, and nobody was asked for any."""

    requests: tuple[int, ...]
    drafted: tuple[int, ...]
    committed: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    contexts: tuple[int, ...] = ()
    forward_seconds: float = 0.0
    rested: bool = False

    @property
    def accepted(self) -> tuple[int, ...]:
        """Accepted draft tokens of each request."""
        return tuple(max(0, count - 1) for count in self.committed)

    @property
    def rows(self) -> tuple[int, ...]:
        """Of each request in the forward."""
        return tuple(1 + count for count in self.drafted)

    @property
    def draft_tokens(self) -> int:
        """Of all its requests."""
        return sum(self.drafted)


class RoundRecorder:
    """Decodes ``requests``, ``at_once`` of them together, round by round. Close it."""

    def __init__(self, target: Target, requests: Seq[Request], at_once: int) -> None:
        self._decoder = Decoder(target)
        self._requests, self._at_once = requests, at_once
        self._places: list[tuple[int, Generation]] = []
        self._joined = self._stayed = 0

    @property
    def done(self) -> bool:
        """Whether every request has been answered."""
        return self._joined >= len(self._requests) and all(number == UNCOUNTED for number, _ in self._places)

    def running(self) -> list[Generation]:
        """The requests of the next round; they have joined, and what is done to them counts in it."""
        while len(self._places) < self._at_once:
            request = self._requests[self._joined % len(self._requests)]
            number = self._joined if self._joined < len(self._requests) else UNCOUNTED
            self._places.append((number, self._decoder.submit(request)))
            self._joined += 1
        return [one for _, one in self._places]

    def step(self) -> RoundRecord:
        """Run a round. Raises the error of a request that fails."""
        running = self.running()
        contexts = tuple(len(one.sequence.tokens) - 1 for one in running)
        joined = len(self._places) > self._stayed
        before = [(one.metrics.drafted, one.metrics.committed, dict(one.metrics.phase_seconds)) for one in running]
        payoff = payoff_of(self._decoder.target, running)
        rested = payoff is not None and not payoff.drafts
        began = perf_counter()
        self._decoder.step()
        elapsed = perf_counter() - began
        for one in running:
            one.raise_error()
        drafted = tuple(one.metrics.drafted - old[0] for one, old in zip(running, before, strict=True))
        committed = tuple(one.metrics.committed - old[1] for one, old in zip(running, before, strict=True))
        drafting = max(
            one.metrics.phase_seconds["draft"] - old[2]["draft"] for one, old in zip(running, before, strict=True)
        )
        rounds = sum(running[0].metrics.phase_seconds[phase] - before[0][2][phase] for phase in PHASES)
        whole = rounds if joined else elapsed
        forward = running[0].metrics.phase_seconds["score"] - before[0][2]["score"]
        requests = tuple(number for number, _ in self._places)
        self._places = [(number, one) for number, one in self._places if one.finish_reason is None]
        self._stayed = len(self._places)
        return RoundRecord(requests, drafted, committed, drafting, whole - drafting, contexts, forward, rested)

    def close(self) -> None:
        """End what still runs."""
        for _, one in self._places:
            one.cancel()
        if self._places:
            with contextlib.suppress(Exception):
                self._decoder.step()
        self._places = []


def record_rounds(target: Target, requests: Seq[Request], at_once: int = 1) -> list[RoundRecord]:
    """All rounds in which ``target`` answers the requests. Nothing stays open. Raises the error of one that fails."""
    recorder = RoundRecorder(target, [replace(one, keep=False) for one in requests], at_once)
    try:
        found = []
        while not recorder.done:
            found.append(recorder.step())
        return found
    finally:
        recorder.close()

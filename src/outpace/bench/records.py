"""What one method did on one prompt, and how that is measured when several requests run together.

As on a server under load, a constant number of requests is decoded at once: when one ends, the next one joins. After
the last one has joined, places are kept by requests that are not counted, until the last counted one has ended. So a
method's figures don't depend on which answers end first.

The wall time of a round is split equally among the requests in it, so that each prompt has seconds of its own. Reading
a prompt belongs to the request that joins. A batch's decode rate is thus the tokens after each request's first, over
the time of the rounds after each request's first. The time to the first token is not split: it is what a user waits
who has a place. Time between two steps of a batch, in which another one had its turn (:mod:`outpace.bench.slices`),
counts nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from outpace.bench.quality.measured_nodes import MeasuredNodes
from outpace.certify.near_ties import gap, parting
from outpace.core.metrics import PHASES, RequestMetrics, total
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request, RoundCount, RoundTrace
from outpace.targets.base import Target


@dataclass(slots=True)
class Answer:
    """One turn's answer. ``metrics`` hold the request's counters, with its share of the batch's time."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    metrics: RequestMetrics
    ttft: float
    """Seconds from the submission of this request to its first token."""
    cut_off: bool = False
    """Whether it reached the length limit."""
    rounds: Sequence[RoundTrace] = ()
    """Its rounds, where the request was traced."""
    counts: Sequence[RoundCount] = ()
    """What its rounds drafted and committed, where the request counted them."""
    wall: float = 0.0
    """Seconds from the submission of this request to its last token, whatever else was decoded meanwhile."""
    incomplete: bool = False
    """Whether the length limit cut it before it was complete under its grammar."""
    error: str | None = None
    """What ended the request, where that was an error of its own; ``tokens`` are then no answer."""
    nodes: Sequence[tuple[int, int]] = ()
    """Those of its nodes whose rounds have kept their trees, if not all have."""


@dataclass(slots=True)
class Record:
    """All turns of one prompt with one method."""

    prompt: str
    category: str
    batch: int = 0
    """Which batch of the bench it belongs to: its prompts share rounds, and so the state of the machine."""
    answers: list[Answer] = field(default_factory=list)
    peak_memory_mb: float = 0.0

    @property
    def metrics(self) -> RequestMetrics:
        return total(answer.metrics for answer in self.answers)

    @property
    def decode_rate(self) -> tuple[float, float]:
        """(tokens after those of the first round, seconds after it), summed over the turns."""
        metrics = self.metrics
        return metrics.decode_tokens, metrics.decode_seconds


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a method's answers to a prompt and those of autoregressive decoding."""

    prompt: str
    turn: int
    position: int
    gap: float | None
    near_tie: bool


def answer_together(
    target: Target, requests: Sequence[Request], at_once: int | None = None, *, keep_failed: bool = False
) -> list[Answer]:
    """Answer all requests, ``at_once`` at a time (None: all). Whatever happens, nothing stays open in the target.

    A request that ends in an error of its own, a grammar's dead end for one, raises it; with ``keep_failed`` the others
    go on, and its answer has the ``error``.
    """
    batch = AnswerBatch(target, requests, at_once, keep_failed=keep_failed)
    try:
        while batch.step():
            pass
        return batch.answers()
    finally:
        batch.close()


@dataclass(slots=True)
class _Place:
    """A request in the batch: how many seconds are its own, and how many of these before its first token."""

    number: int
    generation: Generation
    seconds: float = 0.0
    until_first: float | None = None
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    waited: float = 0.0
    """Seconds since its submission in which its batch did nothing."""
    waited_until_first: float = 0.0
    nodes: MeasuredNodes | None = None

    @property
    def running(self) -> bool:
        return self.generation.finish_reason is None

    def answer(self) -> Answer:
        metrics = total([self.generation.metrics])
        metrics.seconds, metrics.first_token_seconds = self.seconds, self.until_first or 0.0
        metrics.phase_seconds = self.phases
        one = self.generation
        cut_off = one.finish_reason == "length"
        incomplete = cut_off and one.grammar_complete is False
        ttft = one.metrics.first_token_seconds - self.waited_until_first
        tokens, wall = tuple(one.tokens), max(0.0, one.metrics.seconds - self.waited)
        error = None if one.error is None else str(one.error)
        return Answer(
            one.request.prompt,
            tokens,
            metrics,
            ttft,
            cut_off,
            one.rounds,
            one.round_counts,
            wall,
            incomplete,
            error,
            () if self.nodes is None else self.nodes.places,
        )


class AnswerBatch:
    """Requests that are decoded ``at_once`` (None: all), and those that keep their places when the last ones have
    joined. Nothing is open in the target before the first :meth:`step` and after :meth:`close`.

    ``keep_failed``: see :func:`answer_together`. ``nodes``: of each request, if given: the other trees are dropped.
    ``peak_memory_mb``: of the process during its turns; ``disturbed``: whether costs were measured in one of them; both
    where somebody looks (:mod:`outpace.bench.slices`).
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[Request],
        at_once: int | None = None,
        *,
        keep_failed: bool = False,
        nodes: Sequence[MeasuredNodes] = (),
    ) -> None:
        self.decoder = Decoder(target)
        self.nodes = nodes
        self.requests, self.at_once, self.keep_failed = requests, at_once or len(requests), keep_failed
        self.places: list[_Place] = []
        self.joined = 0
        self.peak_memory_mb = 0.0
        self.disturbed = False
        self._counted: list[_Place] = []
        self._stopped: float | None = None
        """When the last step ended."""

    @property
    def tokens(self) -> int:
        """How many the requests that count have."""
        return sum(len(place.generation.tokens) for place in self._counted)

    @property
    def running(self) -> bool:
        """Whether a request that counts is left."""
        return len(self._counted) < len(self.requests) or any(place.running for place in self._counted)

    def step(self) -> bool:
        """Let requests join, and run a round; whether a request that counts is left. Raises the error of a request,
        where it is not to be kept."""
        if not self.running:
            return False
        began = perf_counter()
        waited = 0.0 if self._stopped is None else began - self._stopped
        for place in self.places:
            place.waited += waited
        joining = self._fill()
        self._counted += [place for place in joining if place.number < len(self.requests)]
        self._step(joining)
        for place in self.places if not self.keep_failed else ():
            place.generation.raise_error()
        self.places = [place for place in self.places if place.running]
        self._stopped = perf_counter()
        return self.running

    def answers(self) -> list[Answer]:
        """In the order of the requests, when all have ended."""
        return [place.answer() for place in self._counted]

    def close(self) -> None:
        """End what still runs."""
        for place in self.places:
            place.generation.cancel()
        if self.places:
            with contextlib.suppress(Exception):
                self.decoder.step()

    def _fill(self) -> list[_Place]:
        """Let requests join until ``at_once`` run; earlier ones again, not counted, after the last one."""
        before = len(self.places)
        while len(self.places) < self.at_once:
            request = self.requests[self.joined % len(self.requests)]
            if self.joined >= len(self.requests):
                request = replace(request, namespace="", trace=False)  # nothing is learned twice from one prompt
            place = _Place(self.joined, self.decoder.submit(request))
            if self.joined < len(self.nodes):
                place.nodes = self.nodes[self.joined]
            self.places.append(place)
            self.joined += 1
        return self.places[before:]

    def _step(self, joining: Sequence[_Place]) -> None:
        began, lead = perf_counter(), self.places[0].generation.metrics
        before = dict(lead.phase_seconds)
        self.decoder.step()
        elapsed = perf_counter() - began
        for place in self.places:
            if place.nodes is not None:
                place.nodes.follow(place.generation.rounds)
        split = {phase: lead.phase_seconds[phase] - before[phase] for phase in PHASES}
        reading = max(0.0, elapsed - sum(split.values())) if joining else 0.0
        for place in self.places:
            place.seconds += (elapsed - reading) / len(self.places)
            if place in joining:
                place.seconds += reading / len(joining)
            for phase in PHASES:
                place.phases[phase] += split[phase] / len(self.places)
            if place.until_first is None and place.generation.tokens:
                place.until_first, place.waited_until_first = place.seconds, place.waited


def first_difference(
    target: Target, ours: Record, reference: Record, params: SamplingParams, eos_ids: Iterable[int]
) -> Difference | None:
    """Compare two records of one prompt; None where every turn's tokens are the same."""
    for turn, (mine, theirs) in enumerate(zip(ours.answers, reference.answers, strict=True)):
        parted = parting(mine.tokens, theirs.tokens)
        if parted is None:
            continue
        position, *chosen = parted
        if mine.context != theirs.context:  # an earlier turn parted at a tie that was counted there
            return Difference(reference.prompt, turn + 1, position, None, False)
        apart = gap(target, theirs.context, theirs.tokens[:position], chosen, params, eos_ids)
        return Difference(reference.prompt, turn + 1, position, apart.size, apart.near_tie)
    return None

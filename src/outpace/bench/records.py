"""What one method did on one prompt, and how that is measured when several requests run together.

The wall time of a round is split equally among the requests in it, so that each prompt has seconds of its own, which
add up to those of the batch. A batch's decode rate is thus the tokens after each request's first, over the time from
the end of the first round to the end. The time to the first token is not split: it is what a user waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outpace.certify.near_ties import gap, parting
from outpace.core.metrics import PHASES, RequestMetrics, total
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request
from outpace.targets.base import Target


@dataclass(slots=True)
class Answer:
    """One turn's answer. ``metrics`` hold the request's counters, with its share of the batch's time."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    metrics: RequestMetrics
    ttft: float
    """Seconds from the submission of the batch to this request's first token."""


@dataclass(slots=True)
class Record:
    """All turns of one prompt with one method."""

    prompt: str
    category: str
    answers: list[Answer] = field(default_factory=list)
    peak_memory_mb: float = 0.0

    @property
    def metrics(self) -> RequestMetrics:
        return total(answer.metrics for answer in self.answers)

    @property
    def decode_rate(self) -> tuple[float, float]:
        """(tokens after the first, seconds after the first), summed over the turns."""
        metrics = self.metrics
        return metrics.tokens - metrics.answered, metrics.decode_seconds


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a method's answers to a prompt and those of autoregressive decoding."""

    prompt: str
    turn: int
    position: int
    gap: float | None
    near_tie: bool


def answer_together(target: Target, requests: Sequence[Request]) -> list[Answer]:
    """Run requests side by side until all are done. Whatever happens, nothing stays open in the target."""
    decoder = Decoder(target)
    began = perf_counter()
    generations: list[Generation] = []
    try:
        for request in requests:
            generations.append(decoder.submit(request))  # noqa: PERF401 - what was submitted must be released
        shares = _run(decoder, generations, began)
        for one in generations:
            one.raise_error()
    except BaseException:
        for generation in generations:
            generation.cancel()
        with contextlib.suppress(Exception):
            decoder.step()
        raise
    return [
        Answer(request.prompt, tuple(one.tokens), share, one.metrics.first_token_seconds)
        for request, one, share in zip(requests, generations, shares, strict=True)
    ]


def _run(decoder: Decoder, generations: Sequence[Generation], began: float) -> list[RequestMetrics]:
    """Step until all are done; every request's counters, with its share of the time."""
    spent = [0.0] * len(generations)
    first = [0.0] * len(generations)
    phases = [dict.fromkeys(PHASES, 0.0) for _ in generations]
    more, rounds = True, 0
    while more and (running := [i for i, one in enumerate(generations) if one.finish_reason is None]):
        lead = generations[running[0]].metrics
        before = dict(lead.phase_seconds)
        more = decoder.step()
        now = perf_counter()
        for i in running:
            spent[i] += (now - began) / len(running)
            if rounds == 0:
                first[i] = spent[i]
            for phase in PHASES:
                phases[i][phase] += (lead.phase_seconds[phase] - before[phase]) / len(running)
        began = now
        rounds += 1
    shares = [total([one.metrics]) for one in generations]
    for share, seconds, until_first, split in zip(shares, spent, first, phases, strict=True):
        share.seconds, share.first_token_seconds, share.phase_seconds = seconds, until_first, split
    return shares


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

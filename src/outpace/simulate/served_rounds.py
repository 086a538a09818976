"""What a server on this machine adds to rounds, read from traces that it wrote.

A server's rounds share processors with its event loop, with tokens on their way to clients, and on one machine with
these clients; and between rounds requests are planned and told of. A trace has what each round took, and what each
request did: the difference is what lies between rounds, and the prompts of others that were read meanwhile. Fitted are
how many times as long rounds take as outside of a server, for each size of the batch that the traces have, and from
each trace, for the mean batch of its rounds: how many times as long prompts take to read, and the seconds between
rounds. Each is linear between the batches.

A busy server reads a chunk of some prompt after almost every round, so that a trace hardly tells how much of what lies
between rounds is reading. So reading is expected to take about as many times as long as rounds do, or as in a trace in
which requests were alone, and differs from that by as much as the requests show clearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from outpace.traces.trace_format import TracedRequest

_MOST = 400
"""Requests of a trace that are read."""
_SPREAD = 0.2
"""How far what reading takes in a server, over what it takes outside, is from what is expected: a standard deviation,
as a share."""
_SHARE = 0.1
"""Of all rounds; fewer of a batch say little of it alone."""

Modelled = Callable[[list[int], list[int]], float]
"""Seconds of a round outside of a server, without its draft, from the rows and contexts of its requests."""


Curve = tuple[tuple[float, float], ...]
"""A figure by batch, ascending: linear in between, constant beyond. Empty: not known."""


@dataclass(frozen=True, slots=True)
class ServedRounds:
    """``slow``: how many times as long rounds take in the server. ``reading``: and prompts to read. ``gap``: seconds
    between two rounds. By the mean batch of a trace's rounds, ``slow`` by that of each round."""

    slow: Curve = ((1, 1.0),)
    gap: Curve = ((1, 0.0),)
    reading: Curve = ((1, 1.0),)

    def seconds(self, alone: float, batch: int) -> float:
        """Of a round of ``batch`` requests that takes ``alone`` outside of the server."""
        return alone * _at(self.slow, batch)

    def between(self, batch: int) -> float:
        """From its end, when its tokens are known, until the next one begins."""
        return _at(self.gap, batch)

    def read(self, alone: float, batch: int) -> float:
        """Reading a prompt that takes ``alone`` outside of the server, beside rounds of ``batch`` requests."""
        return alone * _at(self.reading, batch)

    @property
    def words(self) -> str:
        """What was fitted."""
        slow = ", ".join(f"{factor:.2f} times (batch {batch:.3g})" for batch, factor in self.slow)
        reading = ", ".join(f"{factor:.2f} times (batch {batch:.3g})" for batch, factor in self.reading)
        gap = ", ".join(f"{1e3 * seconds:.2f} ms (batch {batch:.3g})" for batch, seconds in self.gap)
        return f"in the server rounds take {slow} as long, and reading a prompt {reading}; between two rounds lie {gap}"


def _at(curve: Curve, batch: int) -> float:
    return float(np.interp(batch, [one for one, _ in curve], [each for _, each in curve]))


class _Round(NamedTuple):
    """``batch`` requests in it; its seconds without the draft, and those that are modelled."""

    batch: int
    seconds: float
    modelled: float


class _Decoding(NamedTuple):
    """A request's rounds after its first one: how many, the seconds between them, and what reading the prompts of
    requests that came meanwhile takes outside of a server."""

    rounds: int
    between: float
    others: float


def fit(
    traces: Iterable[Seq[TracedRequest]],
    modelled: Modelled,
    reading: Callable[[int], float],
    beside: Callable[[int], float] | None = None,
) -> ServedRounds:
    """From the requests of servers on this machine. ``reading``: seconds of reading a prompt of so many tokens at
    once; ``beside``: and in the chunks that are read beside rounds, which take longer; None: as long.

    Traces without times, or with no request of two rounds, fit nothing.
    """
    known = [[one for one in requests if len(one.rounds) > 1 and _has_times(one)][:_MOST] for requests in traces]
    slow = _by_batch([each for requests in known for one in requests for each in _rounds(one, modelled)])
    if not slow:
        return ServedRounds()
    gaps: dict[float, float] = {}
    read: dict[float, float] = {}
    expected = _at(slow, 1)
    for requests in sorted(filter(None, known), key=_mean_batch):  # those of a user alone first
        batch = _mean_batch(requests)
        # A request that nobody ran beside began to be read when it arrived.
        alone = [one for one in requests if max(one.rounds.batch) == 1]
        first = _ratio((_until_read(one, modelled, slow), reading(_unread(one))) for one in alone)
        expected = first or expected
        readings = _readings(requests, beside or reading)
        gaps[batch], others = _gap_and_reading([_decoding(one, readings) for one in requests], expected, batch)
        if (factor := first if batch == 1 else others) is not None:
            read[batch] = factor
    return ServedRounds(slow, _curve(gaps), _curve(read) or ((1, _at(slow, 1)),))


def _mean_batch(requests: Seq[TracedRequest]) -> float:
    """Of the rounds after a request's first one."""
    counts = [batch for one in requests for batch in one.rounds.batch[1:]]
    return sum(counts) / len(counts)


def _curve(points: Mapping[float, float]) -> Curve:
    return tuple(sorted(points.items()))


def _until_read(one: TracedRequest, modelled: Modelled, slow: Curve) -> float:
    """Seconds until its first token, without those of the round that it came from. A first round that took longer than
    others do counts to the reading, after which caches are cold."""
    round_seconds = modelled([1 + one.rounds.drafted[0]], [one.prompt_tokens - 1]) * _at(slow, 1)
    return max(0.0, (one.first_token or 0.0) - round_seconds - one.rounds.draft_ms[0] / 1e3)


def _by_batch(rounds: Seq[_Round]) -> Curve:
    """Measured over modelled, by batch. Sizes of which there are few rounds stand together, at their mean."""
    groups: list[list[_Round]] = [[]]
    for _, alike in groupby(sorted(rounds, key=lambda one: one.batch), key=lambda one: one.batch):
        if len(groups[-1]) >= _SHARE * len(rounds):
            groups.append([])
        groups[-1] += alike
    if len(groups) > 1 and len(groups[-1]) < _SHARE * len(rounds):
        last = groups.pop()
        groups[-1] += last
    found: dict[float, float] = {}
    for group in filter(None, groups):
        if (ratio := _ratio((one.seconds, one.modelled) for one in group)) is not None:
            found[sum(one.batch for one in group) / len(group)] = ratio
    return _curve(found)


def _ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Of the sums of what was measured and of what was expected; None where nothing was."""
    measured = expected = 0.0
    for one, other in pairs:
        measured, expected = measured + one, expected + other
    return measured / expected if expected > 0.0 and measured > 0.0 else None


def _unread(one: TracedRequest) -> int:
    return one.prompt_tokens - one.cached_tokens


def _has_times(one: TracedRequest) -> bool:
    return one.arrival is not None and one.first_token is not None and one.seconds is not None


def _rounds(one: TracedRequest, modelled: Modelled) -> Iterator[_Round]:
    """The rounds after its first one. What the other requests of a round draft, and how long they are, is not in its
    line: they count as it does."""
    context = one.prompt_tokens - 1 + one.rounds.committed[0]
    rounds = one.rounds
    columns = (rounds.drafted, rounds.committed, rounds.batch, rounds.ms, rounds.draft_ms)
    for drafted, committed, batch, spent, drafting in list(zip(*columns, strict=True))[1:]:
        yield _Round(batch, max(0.0, spent - drafting) / 1e3, modelled([1 + drafted] * batch, [context] * batch))
        context += committed


def turnaround(requests: Seq[TracedRequest], users: int) -> float:
    """Seconds from the end of an answer to its user's next request: of ``users`` who each sent the next request when
    the last one was answered. 0 where the trace does not tell."""
    known = [one for one in requests if one.arrival is not None and one.seconds is not None]
    arrivals = sorted(one.arrival or 0.0 for one in known)[users:]
    ends = sorted((one.arrival or 0.0) + (one.seconds or 0.0) for one in known)
    gaps = [begun - ended for ended, begun in zip(ends, arrivals, strict=False)]
    return max(0.0, float(np.median(gaps))) if gaps else 0.0


class _Reading(NamedTuple):
    """A prompt was read in the steps between two moments; ``seconds``: what that takes outside of a server."""

    began: float
    ended: float
    seconds: float

    def within(self, began: float, ended: float) -> float:
        """Of its seconds, those between two other moments."""
        if self.ended <= self.began:
            return self.seconds if began < self.ended <= ended else 0.0
        shared = min(ended, self.ended) - max(began, self.began)
        return self.seconds * max(0.0, shared) / (self.ended - self.began)


def _readings(requests: Seq[TracedRequest], reading: Callable[[int], float]) -> list[_Reading]:
    """When the prompts were read: one after the other, each until the round of its first token."""
    found: list[_Reading] = []
    for one in sorted(requests, key=lambda one: (one.arrival or 0.0) + (one.first_token or 0.0)):
        arrival = one.arrival or 0.0
        ended = arrival + max(0.0, (one.first_token or 0.0) - one.rounds.ms[0] / 1e3)
        began = max(arrival, found[-1].ended) if found else arrival
        found.append(_Reading(min(began, ended), ended, reading(_unread(one))))
    return found


def _decoding(one: TracedRequest, readings: Seq[_Reading]) -> _Decoding:
    """What lies between its rounds; its own prompt was read before."""
    begins, ends = (one.arrival or 0.0) + (one.first_token or 0.0), (one.arrival or 0.0) + (one.seconds or 0.0)
    between = ends - begins - sum(one.rounds.ms[1:]) / 1e3
    return _Decoding(len(one.rounds) - 1, between, sum(each.within(begins, ends) for each in readings))


def _gap_and_reading(decoded: Seq[_Decoding], expected: float, batch: float) -> tuple[float, float | None]:
    """Seconds between two rounds, and how many times as long as outside of a server prompts take to read, neither below
    0: least squares, and ``expected`` with its :data:`_SPREAD` (the mean of a normal posterior). ``batch`` requests
    see the same rounds. The factor is None where nothing was read."""
    rounds = np.array([one.rounds for one in decoded], float)
    between = np.array([one.between for one in decoded])
    others = np.array([one.others for one in decoded])
    if not others.any():
        return max(0.0, float(between.sum() / rounds.sum())), None
    sides = np.stack([rounds, others], axis=1)
    found, *_ = np.linalg.lstsq(sides, between, rcond=None)
    noise = batch * float(np.square(between - sides @ found).sum()) / max(1, len(decoded) - 2)
    trust = noise / (_SPREAD * expected) ** 2
    weights, wanted = sides.T @ sides, sides.T @ between
    weights[1, 1] += trust
    wanted[1] += trust * expected
    gap, factor = (float(one) for one in np.linalg.lstsq(weights, wanted, rcond=None)[0])
    if gap < 0.0:
        gap, factor = 0.0, float(wanted[1] / weights[1, 1])
    elif factor < 0.0:
        gap, factor = float(wanted[0] / weights[0, 0]), 0.0
    return max(0.0, gap), max(0.0, factor)

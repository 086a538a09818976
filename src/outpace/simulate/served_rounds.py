"""What a server on this machine adds to rounds, read from traces that it wrote.

A server's rounds share processors with its event loop, with tokens on their way to clients, and on one machine with
these clients; and between rounds requests are planned and told of. A trace has what each round took, and what each
request did: the difference is what lies between rounds, and the prompts of others that were read meanwhile. Fitted are,
for each size of the batch that the traces have: how many times as long rounds take as outside of a server; how many
times as long prompts take to read; and the seconds between rounds. Each is linear between the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outpace.traces.trace_format import TracedRequest

_MOST = 400
"""Requests of a trace that are read."""
_ALIKE = 0.05
"""Requests that read this much alike, for their rounds, do not tell what reading takes."""
_SHARE = 0.1
"""Of all rounds; fewer of a batch say little of it."""

Modelled = Callable[[list[int], list[int]], float]
"""Seconds of a round outside of a server, without its draft, from the rows and contexts of its requests."""


Curve = tuple[tuple[int, float], ...]
"""A figure by batch, ascending: linear in between, constant beyond. Empty: not known."""


@dataclass(frozen=True, slots=True)
class ServedRounds:
    """``slow``: how many times as long rounds take in the server. ``reading``: and prompts to read. ``gap``: seconds
    between two rounds. All by the largest batch of a trace, ``slow`` by that of each round."""

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
        """Reading a prompt that takes ``alone`` outside of the server, while ``batch`` requests are there."""
        return alone * _at(self.reading, batch)

    @property
    def words(self) -> str:
        """What was fitted."""
        slow = ", ".join(f"{factor:.2f} times (batch {batch})" for batch, factor in self.slow)
        reading = ", ".join(f"{factor:.2f} times (batch {batch})" for batch, factor in self.reading)
        gap = ", ".join(f"{1e3 * seconds:.2f} ms (batch {batch})" for batch, seconds in self.gap)
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
    gaps: dict[int, float] = {}
    read: dict[int, float] = {}
    for requests in filter(None, known):
        batch = max(max(one.rounds.batch) for one in requests)
        readings = _readings(requests, beside or reading)
        decoded = [_decoding(one, readings) for one in requests]
        # A request that nobody ran beside began to be read when it arrived.
        alone = [one for one in requests if max(one.rounds.batch) == 1]
        first = _ratio((_until_read(one, modelled, slow), reading(_unread(one))) for one in alone)
        gaps[batch], others = _gap_and_reading(decoded, first or _at(slow, batch))
        if (factor := first if batch == 1 else others) is not None:
            read[batch] = factor
    return ServedRounds(slow, _curve(gaps), _curve(read) or ((1, _at(slow, 1)),))


def _curve(points: Mapping[int, float]) -> Curve:
    return tuple(sorted(points.items()))


def _until_read(one: TracedRequest, modelled: Modelled, slow: Curve) -> float:
    """Seconds until its first token, without those of the round that it came from. A first round that took longer than
    others do counts to the reading, after which caches are cold."""
    round_seconds = modelled([1 + one.rounds.drafted[0]], [one.prompt_tokens - 1]) * _at(slow, 1)
    return max(0.0, (one.first_token or 0.0) - round_seconds - one.rounds.draft_ms[0] / 1e3)


def _by_batch(rounds: Seq[_Round]) -> tuple[tuple[int, float], ...]:
    """Measured over modelled, for each size of the batch that has a good part of the rounds."""
    found = []
    for batch in sorted({one.batch for one in rounds}):
        alike = [(one.seconds, one.modelled) for one in rounds if one.batch == batch]
        ratio = _ratio(alike)
        if len(alike) >= _SHARE * len(rounds) and ratio is not None:
            found.append((batch, ratio))
    return tuple(found)


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


def _gap_and_reading(decoded: Seq[_Decoding], usual: float) -> tuple[float, float | None]:
    """Seconds between two rounds, and how many times as long as outside of a server prompts take to read, by least
    squares; neither below 0. ``usual``: that factor, where the requests do not tell. None: nothing was read."""
    rounds = np.array([one.rounds for one in decoded], float)
    between = np.array([one.between for one in decoded])
    others = np.array([one.others for one in decoded])
    if not others.any():
        return max(0.0, float(between.sum() / rounds.sum())), None
    sides = np.stack([rounds, others], axis=1)
    if np.linalg.matrix_rank(sides / sides.max(axis=0), tol=_ALIKE) < 2:
        return max(0.0, float((between - usual * others).sum() / rounds.sum())), usual
    gap, factor = (float(one) for one in np.linalg.lstsq(sides, between, rcond=None)[0])
    if gap < 0.0:
        return 0.0, max(0.0, float(between @ others / (others @ others)))
    if factor < 0.0:
        return max(0.0, float(between.sum() / rounds.sum())), usual
    return gap, factor

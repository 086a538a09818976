"""What a server on this machine adds to rounds, read from traces that it wrote.

A server's rounds share processors with its event loop, with tokens on their way to clients, and on one machine with
these clients; and between rounds requests are planned and told of. A trace has what each round took, and what each
request did: the difference is what lies between rounds, and the prompts of others that were read meanwhile. Fitted are
how many times as long rounds take as outside of a server, for each size of the batch that the traces have; how many
times as long prompts take to read; and from each trace the seconds between rounds, for the mean batch of its rounds.
Figures by batch are linear in between.

A busy server reads a chunk of some prompt after almost every round, and a trace does not have whose: it does not tell
how much of what lies between rounds is reading (least squares said a half, LOG.md). So what reading takes is found
where requests were alone, and is taken to be the same beside others; without such a trace, as for rounds.
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
_SHARE = 0.1
"""Of all rounds; fewer of a batch say little of it alone."""

Modelled = Callable[[list[int], list[int]], float]
"""Seconds of a round outside of a server, without its draft, from the rows and contexts of its requests."""


Curve = tuple[tuple[float, float], ...]
"""A figure by batch, ascending: linear in between, constant beyond. Empty: not known."""


@dataclass(frozen=True, slots=True)
class ServedRounds:
    """``slow``: how many times as long rounds take in the server, by their batch. ``gap``: seconds between two rounds,
    by the mean batch of a trace's rounds. ``reading``: how many times as long prompts take to read."""

    slow: Curve = ((1, 1.0),)
    gap: Curve = ((1, 0.0),)
    reading: float = 1.0

    def seconds(self, alone: float, batch: int) -> float:
        """Of a round of ``batch`` requests that takes ``alone`` outside of the server."""
        return alone * _at(self.slow, batch)

    def between(self, batch: int) -> float:
        """From its end, when its tokens are known, until the next one begins."""
        return _at(self.gap, batch)

    @property
    def words(self) -> str:
        """What was fitted."""
        slow = ", ".join(f"{factor:.2f} times (batch {batch:.3g})" for batch, factor in self.slow)
        gap = ", ".join(f"{1e3 * seconds:.2f} ms (batch {batch:.3g})" for batch, seconds in self.gap)
        reading = f"reading a prompt {self.reading:.2f} times"
        return f"in the server rounds take {slow} as long, and {reading}; between two rounds lie {gap}"


def _at(curve: Curve, batch: int) -> float:
    return float(np.interp(batch, [one for one, _ in curve], [each for _, each in curve]))


class _Round(NamedTuple):
    """``batch`` requests in it; its seconds without the draft, and those that are modelled."""

    batch: int
    seconds: float
    modelled: float


class _Decoding(NamedTuple):
    """A request's rounds after its first one: how many, the seconds between them, and what reading the prompts of
    requests that came meanwhile takes outside of a server. ``share``: its part of these rounds, of which each of a
    batch has one."""

    rounds: int
    between: float
    others: float
    share: float


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
    alone: float | None = None
    for requests in sorted(filter(None, known), key=_mean_batch):  # those of a user alone first
        batch = _mean_batch(requests)
        if batch == 1:  # nobody ran beside these: they began to be read when they arrived
            alone = _ratio((_until_read(one, modelled, slow), reading(_unread(one))) for one in requests)
        readings = _readings(requests, beside or reading)
        gaps[batch] = _gap([_decoding(one, readings) for one in requests], alone or _at(slow, 1))
    return ServedRounds(slow, _curve(gaps), alone or _at(slow, 1))


def _mean_batch(requests: Seq[TracedRequest]) -> float:
    """Of the rounds after a request's first one, each counted once, though all its requests have it."""
    counts = [batch for one in requests for batch in one.rounds.batch[1:]]
    return len(counts) / sum(1.0 / count for count in counts)


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
    others = sum(each.within(begins, ends) for each in readings)
    return _Decoding(len(one.rounds) - 1, between, others, 1.0 / _mean_batch([one]))


def _gap(decoded: Seq[_Decoding], reading: float) -> float:
    """Seconds between two rounds, where prompts take ``reading`` times as long to read as outside of a server."""
    between = sum(one.share * (one.between - reading * one.others) for one in decoded)
    return max(0.0, between / sum(one.share * one.rounds for one in decoded))

"""What a server on this machine adds to rounds, read from traces that it wrote.

A server's rounds share processors with its event loop, with tokens on their way to clients, and on one machine with
these clients; and between rounds requests are planned and told of. A trace has what each round took, and what each
request did: the difference is what lies between rounds. Three numbers are fitted: how many times as long rounds take as
outside of a server, and the seconds between rounds, ``fixed`` and for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outpace.traces.trace_format import TracedRequest

_MOST = 400
"""Requests of a trace that are read."""

Modelled = Callable[[list[int], list[int]], float]
"""Seconds of a round outside of a server, without its draft, from the rows and contexts of its requests."""


@dataclass(frozen=True, slots=True)
class ServedRounds:
    """``slow``: how many times as long rounds take in the server. Between two of them lie ``fixed`` seconds, and
    ``each`` for every request."""

    slow: float = 1.0
    fixed: float = 0.0
    each: float = 0.0

    def seconds(self, alone: float, batch: int) -> float:
        """Of a round of ``batch`` requests that takes ``alone`` outside of the server, until the next one begins."""
        return self.slow * alone + self.fixed + self.each * batch

    @property
    def words(self) -> str:
        """What was fitted."""
        return (
            f"rounds take {self.slow:.2f} times as long in the server, {1e3 * self.fixed:.2f} ms lie between them and "
            f"{1e3 * self.each:.2f} ms for each request"
        )


class _Decoding(NamedTuple):
    """A request's rounds after its first one: how many, the ``requests`` in them together, and the seconds between
    them in which no prompt was read."""

    rounds: int
    requests: float
    between: float


def fit(traces: Iterable[Seq[TracedRequest]], modelled: Modelled, reading: Callable[[int], float]) -> ServedRounds:
    """From the requests of servers on this machine. ``reading``: seconds of reading a prompt of so many tokens.

    Traces without times, or with no request of two rounds, fit nothing.
    """
    taken = expected = 0.0
    decoded: list[_Decoding] = []
    for requests in traces:
        timed = [one for one in requests if len(one.rounds) > 1 and _has_times(one)][:_MOST]
        for one in timed:
            spent, wanted = _rounds(one, modelled)
            taken, expected = taken + spent, expected + wanted
        slow = taken / expected if expected else 1.0
        decoded += [_decoding(one, timed, lambda rows, factor=slow: factor * reading(rows)) for one in timed]
    if not decoded or not expected:
        return ServedRounds()
    fixed, each = _line(decoded)
    return ServedRounds(taken / expected, fixed, each)


def _has_times(one: TracedRequest) -> bool:
    return one.arrival is not None and one.first_token is not None and one.seconds is not None


def _rounds(one: TracedRequest, modelled: Modelled) -> tuple[float, float]:
    """Seconds of the rounds after its first one without their drafts: in the trace, and as they are modelled. What the
    other requests of a round draft, and how long they are, is not in its line: they count as it does."""
    taken = expected = 0.0
    context = one.prompt_tokens - 1 + one.rounds.committed[0]
    rounds = one.rounds
    columns = (rounds.drafted, rounds.committed, rounds.batch, rounds.ms, rounds.draft_ms)
    for drafted, committed, batch, spent, drafting in list(zip(*columns, strict=True))[1:]:
        taken += max(0.0, spent - drafting) / 1e3
        expected += modelled([1 + drafted] * batch, [context] * batch)
        context += committed
    return taken, expected


def _decoding(one: TracedRequest, others: Seq[TracedRequest], reading: Callable[[int], float]) -> _Decoding:
    begins, ends = (one.arrival or 0.0) + (one.first_token or 0.0), (one.arrival or 0.0) + (one.seconds or 0.0)
    read = sum(
        reading(other.prompt_tokens - other.cached_tokens)
        for other in others
        if other is not one and begins <= (other.arrival or 0.0) < ends
    )
    between = ends - begins - sum(one.rounds.ms[1:]) / 1e3 - read
    return _Decoding(len(one.rounds) - 1, float(sum(one.rounds.batch[1:])), between)


def _line(decoded: Seq[_Decoding]) -> tuple[float, float]:
    """Seconds between rounds, and for each request: least squares, neither below 0."""
    rounds = np.array([one.rounds for one in decoded], float)
    requests = np.array([one.requests for one in decoded])
    between = np.array([one.between for one in decoded])
    alike = np.ptp(requests / rounds) < 0.5
    if not alike:
        fixed, each = np.linalg.lstsq(np.stack([rounds, requests], axis=1), between, rcond=None)[0]
        if fixed >= 0.0 and each >= 0.0:
            return float(fixed), float(each)
        if fixed < 0.0:
            return 0.0, max(0.0, float(between @ requests / (requests @ requests)))
    return max(0.0, float(between.sum() / rounds.sum())), 0.0

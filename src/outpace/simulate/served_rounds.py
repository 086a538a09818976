"""What a server on this machine adds to rounds, read from traces that it wrote.

A server's rounds share processors with its event loop, with tokens on their way to clients, and on one machine with
these clients; and between rounds requests are planned and told of. A trace has what each round took, and what each
request did: the difference is what lies between rounds. Fitted are: how many times as long rounds take as outside of a
server, for each size of the batch that the traces have, and prompts to read; and the seconds between rounds, fixed and
for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outpace.traces.trace_format import TracedRequest

_MOST = 400
"""Requests of a trace that are read."""
_SHARE = 0.1
"""Of all rounds; fewer of a batch say little of it."""

Modelled = Callable[[list[int], list[int]], float]
"""Seconds of a round outside of a server, without its draft, from the rows and contexts of its requests."""


@dataclass(frozen=True, slots=True)
class ServedRounds:
    """``slow``: how many times as long rounds take in the server, by batch, ascending; linear in between.
    ``reading``: and prompts to read. Between two rounds lie ``fixed`` seconds, and ``each`` for every request."""

    slow: tuple[tuple[int, float], ...] = ((1, 1.0),)
    fixed: float = 0.0
    each: float = 0.0
    reading: float = 1.0

    def seconds(self, alone: float, batch: int) -> float:
        """Of a round of ``batch`` requests that takes ``alone`` outside of the server, until the next one begins."""
        factor = float(np.interp(batch, [one for one, _ in self.slow], [each for _, each in self.slow]))
        return factor * alone + self.fixed + self.each * batch

    @property
    def words(self) -> str:
        """What was fitted."""
        slow = ", ".join(f"{factor:.2f} times (batch {batch})" for batch, factor in self.slow)
        return (
            f"in the server rounds take {slow} as long, and reading a prompt {self.reading:.2f} times; "
            f"{1e3 * self.fixed:.2f} ms lie between two rounds, and {1e3 * self.each:.2f} ms for each request"
        )


class _Round(NamedTuple):
    """``batch`` requests in it; its seconds without the draft, and those that are modelled."""

    batch: int
    seconds: float
    modelled: float


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
    known = [[one for one in requests if len(one.rounds) > 1 and _has_times(one)][:_MOST] for requests in traces]
    slow = _by_batch([each for requests in known for one in requests for each in _rounds(one, modelled)])
    # A request that nobody ran beside began to be read when it arrived.
    alone = [one for requests in known for one in requests if max(one.rounds.batch) == 1]
    first = _ratio(((one.first_token or 0.0) - one.rounds.ms[0] / 1e3, reading(_unread(one))) for one in alone)
    if not slow:
        return ServedRounds()
    read = slow[0][1] if first is None else first
    decoded = [_decoding(one, requests, lambda rows: read * reading(rows)) for requests in known for one in requests]
    fixed, each = _line(decoded)
    return ServedRounds(slow, fixed, each, read)


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


def _decoding(one: TracedRequest, others: Seq[TracedRequest], reading: Callable[[int], float]) -> _Decoding:
    begins, ends = (one.arrival or 0.0) + (one.first_token or 0.0), (one.arrival or 0.0) + (one.seconds or 0.0)
    read = sum(
        reading(_unread(other)) for other in others if other is not one and begins <= (other.arrival or 0.0) < ends
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

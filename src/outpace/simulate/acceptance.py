"""Where the simulated rounds come from: those of a trace, played again, or acceptance rates that are drawn from."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence as Seq
from itertools import repeat
from typing import NamedTuple

from outpace.core.errors import BadInput
from outpace.traces.trace_format import TracedRequest


class SimulatedRound(NamedTuple):
    """``drafted`` and ``committed`` tokens; ``draft_seconds``: what drafting took in the trace, and ``levels`` of the
    draft's tree, None where unknown."""

    drafted: int
    committed: int
    draft_seconds: float | None = None
    levels: int | None = None

    @property
    def depth(self) -> int:
        """Levels of the draft; of an unknown one those of a chain."""
        return self.drafted if self.levels is None else self.levels


class Acceptance(ABC):
    """The rounds of requests."""

    described: str
    """For the result, in words."""

    @abstractmethod
    def rounds(self, request: TracedRequest, number: int) -> Iterator[SimulatedRound]:
        """All rounds of one request, the ``number``-th that is simulated. They commit ``output_tokens`` tokens."""


class Recorded(Acceptance):
    """The rounds of the trace, as they were: as many, with the same drafts, and as many tokens accepted of them."""

    described = "the rounds of the trace, played again"

    def rounds(self, request: TracedRequest, number: int) -> Iterator[SimulatedRound]:
        return recorded(request)


class Undrafted(Acceptance):
    """The same tokens without drafts: one in each round."""

    described = "no drafts: a token a round"

    def rounds(self, request: TracedRequest, number: int) -> Iterator[SimulatedRound]:
        if not request.output_tokens:  # its only round was cut before a token
            return iter([SimulatedRound(0, 0)])
        return repeat(SimulatedRound(0, 1), request.output_tokens)


class Beside(Acceptance):
    """``others``, but for requests of method "none", which draft nothing whatever the others draft."""

    def __init__(self, others: Acceptance) -> None:
        self.others, self.described = others, others.described

    def rounds(self, request: TracedRequest, number: int) -> Iterator[SimulatedRound]:
        return recorded(request) if request.method == "none" else self.others.rounds(request, number)


def recorded(request: TracedRequest) -> Iterator[SimulatedRound]:
    """The rounds that a request had."""
    one = request.rounds
    levels = one.levels or [None] * len(one)
    for drafted, committed, spent, depth in zip(one.drafted, one.committed, one.draft_ms, levels, strict=True):
        yield SimulatedRound(drafted, committed, spent / 1e3, depth)


class Rates(Acceptance):
    """Chains of ``length`` draft tokens, the i-th of which is accepted with ``rates[i]`` where all before it were; the
    last rate holds for all deeper ones. Drawn with ``seed``, for each request by itself. ``drafting``: in which
    share of the rounds anything is drafted; a lookup method finds nothing in the others."""

    def __init__(
        self, rates: Seq[float], length: int, seed: int = 0, origin: str = "given rates", drafting: float = 1.0
    ) -> None:
        if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
            raise BadInput(f"acceptance rates must lie between 0 and 1, not {', '.join(map(str, rates)) or 'none'}")
        if length < 0:
            raise BadInput(f"the draft length must be at least 0, not {length}")
        self.rates, self.length, self._seed, self.drafting = list(rates), length, seed, drafting
        often = f" in {100 * drafting:.0f} % of the rounds" if drafting < 1.0 else ""
        self.described = f"drawn from {origin}, with chains of {length} draft tokens{often}"

    def rate(self, depth: int) -> float:
        """Of the draft token at ``depth`` (1 = first)."""
        return self.rates[min(depth, len(self.rates)) - 1]

    def rounds(self, request: TracedRequest, number: int) -> Iterator[SimulatedRound]:
        if not request.output_tokens:  # its only round was cut before a token
            yield SimulatedRound(0, 0)
        chance = random.Random(f"{self._seed}/{number}/{request.id}")
        left = request.output_tokens
        while left > 0:
            drafts = self.drafting >= 1.0 or chance.random() < self.drafting
            drafted = min(self.length, left - 1) if drafts else 0
            accepted = 0
            while accepted < drafted and chance.random() < self.rate(accepted + 1):
                accepted += 1
            yield SimulatedRound(drafted, accepted + 1)
            left -= accepted + 1


def drafting_share(requests: Seq[TracedRequest]) -> float:
    """In which share of the rounds of a trace anything was drafted, of those before an answer's last."""
    drafted = [count > 0 for request in requests for count in request.rounds.drafted[:-1]]
    return sum(drafted) / len(drafted) if drafted else 1.0


def rates_of(requests: Seq[TracedRequest]) -> list[float]:
    """Acceptance rates by depth, given that all tokens before were accepted, of the drafts of a trace.

    A round with d levels of draft tokens of which a were accepted has judged the depths up to a + 1, at most d. Where a
    trace has no levels, d is taken to be the number of draft tokens: exact for chains, too low for trees.
    """
    hits, seen = Counter[int](), Counter[int]()
    for request in requests:
        one = request.rounds
        for depth, accepted in zip(one.levels or one.drafted, one.accepted, strict=True):
            hits.update(range(1, accepted + 1))
            seen.update(range(1, max(accepted, min(depth, accepted + 1)) + 1))
    return [hits[depth] / seen[depth] for depth in sorted(seen)]

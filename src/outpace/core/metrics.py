"""The counters of requests, and the definition of every figure.

Names are the field's; see docs/metrics.md. A *round* is one target forward after the prefill.

========================== =========================================================================
mean_acceptance_length     tokens committed per round, bonus included; 1.00 without drafts
acceptance_rate            accepted draft tokens / drafted tokens (every node of a tree counts)
per_position_acceptance[i] rounds in which the draft token at depth i + 1 was accepted / rounds
ttft_ms                    milliseconds from the start of a request to its first token, prefill included
tokens_per_second          tokens / seconds, prefill included
decode_tokens_per_second   tokens after the first round / seconds after it
time_split                 share of the decoding time in draft, score (the target's forward), accept, other
drafting_rounds            share of rounds in which anything was drafted
drafting_acceptance_length tokens committed per round in which anything was drafted
draft_ms                   milliseconds of drafting per round
drafting_parts             share of rounds in which each part drafted, by name, of a method with parts
constraint_weighting       requests under a grammar by how its tokens were weighted: masked, fvo-exact, fvo-one-step
caches                     what the drafter holds for the request's namespace: entries, bound, entries that had to leave
========================== =========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import Any

PHASES = ("draft", "score", "accept", "other")
_SUMMED = (
    *("prompt_tokens", "cached_tokens", "preemptions", "tokens", "answered"),
    *("rounds", "committed", "drafting", "drafted", "accepted", "judged"),
    *("seconds", "first_token_seconds", "first_tokens"),
)


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator, or None where it is undefined (never NaN)."""
    return numerator / denominator if denominator > 0 else None


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How full a cache is. ``bound``: most entries, as the user set it; ``evicted``: how many had to leave."""

    name: str
    entries: int
    bound: int
    evicted: int = 0


@dataclass(slots=True)
class RequestMetrics:
    """Counters of one request, and the figures defined from them."""

    sampled: bool = False
    """Whether it draws its tokens: its rounds take other times than greedy ones."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's tokens, those whose K/V another request had left."""
    preemptions: int = 0
    """How often it had to wait again, as there was no memory for its K/V."""
    tokens: int = 0
    """New tokens, the end-of-sequence token excluded."""
    answered: int = 0
    """Requests that produced a token: 1 or 0 for one request, their number in a total."""
    rounds: int = 0
    committed: int = 0
    """Tokens committed by rounds, an end-of-sequence token included."""
    drafting: int = 0
    """Rounds in which anything was drafted."""
    drafted: int = 0
    accepted: int = 0
    judged: int = 0
    """Depths at which draft tokens were judged: where one was accepted, and where all were rejected."""
    accepted_at_depth: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """From the start of the request to its last token."""
    first_token_seconds: float = 0.0
    first_tokens: int = 0
    """Tokens that were there at that time: a first round with a draft has several."""
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    caches: tuple[CacheUse, ...] = ()
    """The drafter's caches when the request left."""
    parts: dict[str, int] = field(default_factory=dict)
    """Rounds in which each part drafted, of drafters with parts."""
    weighting: dict[str, int] = field(default_factory=dict)
    """Requests under a grammar, by how its tokens were weighted."""

    def count_round(self, drafted: int, accepted: int, committed: int, depth: int = 0) -> None:
        """One round: ``accepted`` draft tokens of ``drafted`` were kept, ``committed`` tokens in all. ``depth``: of the
        draft's longest path."""
        self.rounds += 1
        if not drafted:
            self.committed += committed
            return
        self.drafting += 1
        self.drafted += drafted
        self.accepted += accepted
        self.judged += max(accepted, min(accepted + 1, depth))
        self.committed += committed
        self.accepted_at_depth += [0] * (accepted - len(self.accepted_at_depth))
        for at in range(accepted):
            self.accepted_at_depth[at] += 1

    @property
    def decode_tokens(self) -> int:
        """Tokens after those of the first round."""
        return self.tokens - self.first_tokens

    @property
    def decode_seconds(self) -> float:
        """Seconds after the first round with a token; 0 where there was none."""
        return self.seconds - self.first_token_seconds if self.answered else 0.0

    def figures(self) -> dict[str, Any]:
        """The defined figures under their public names; undefined ones are None."""
        spent = sum(self.phase_seconds.values())
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": ratio(self.tokens, self.seconds),
            "decode_tokens_per_second": ratio(self.decode_tokens, self.decode_seconds),
            "ttft_ms": ratio(1e3 * self.first_token_seconds, self.answered),
            "mean_acceptance_length": ratio(self.committed, self.rounds),
            "acceptance_rate": ratio(self.accepted, self.drafted),
            "per_position_acceptance": [count / self.rounds for count in self.accepted_at_depth],
            "drafting_rounds": ratio(self.drafting, self.rounds),
            # A round without a draft commits one token.
            "drafting_acceptance_length": ratio(self.committed - (self.rounds - self.drafting), self.drafting),
            "draft_ms": ratio(1e3 * self.phase_seconds["draft"], self.rounds),
            "drafting_parts": {name: ratio(count, self.rounds) for name, count in self.parts.items()},
            "constraint_weighting": dict(self.weighting),
            "caches": [asdict(cache) for cache in self.caches],
            "time_split": {phase: ratio(self.phase_seconds[phase], spent) for phase in PHASES},
        }


def total(parts: Iterable[RequestMetrics]) -> RequestMetrics:
    """The sum of several requests' counters (requests that ran one after the other: seconds add up)."""
    out = RequestMetrics()
    for part in parts:
        for name in _SUMMED:
            setattr(out, name, getattr(out, name) + getattr(part, name))
        depths = zip_longest(out.accepted_at_depth, part.accepted_at_depth, fillvalue=0)
        out.accepted_at_depth = [sum(counts) for counts in depths]
        for phase in PHASES:
            out.phase_seconds[phase] += part.phase_seconds[phase]
        out.caches = part.caches or out.caches
        for counted, more in ((out.parts, part.parts), (out.weighting, part.weighting)):
            for name, count in more.items():
                counted[name] = counted.get(name, 0) + count
    return out


class Timed:
    """Adds the time spent inside to ``phase`` of every split."""

    def __init__(self, splits: Sequence[dict[str, float]], phase: str) -> None:
        self._splits, self._phase = splits, phase

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = perf_counter() - self._began
        for split in self._splits:
            split[self._phase] = split.get(self._phase, 0.0) + spent

"""What rounds take beside what the cost table has for their forwards: measured in a second or two of real rounds.

The table has the quickest of a few forwards one after another. In a round tokens are chosen, K/V is committed, requests
are counted, for each of them: ``fixed`` seconds, and ``each`` for every request. What runs between two forwards leaves
them colder caches: a forward with a row for each request takes ``slow`` times what the table has. Additional rows are
computed while weights are waited for: a forward with many takes what the table has for it, where that is more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from statistics import median

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.engine.round_records import RoundRecord, RoundRecorder
from outpace.targets.base import Sequence, Target
from outpace.targets.costs import Costs

_FEW, _MANY = 1, 8
"""Requests in the rounds that are timed."""
_PROMPT = 48
_WARM, _TIMED = 6, 40
"""Rounds."""


@dataclass(frozen=True, slots=True)
class RoundOverhead:
    """Of rounds beside their forward: ``fixed`` seconds and ``each`` for every request; ``slow``: how many times as
    long a forward with a row for each request takes as the cost table has it."""

    fixed: float = 0.0
    each: float = 0.0
    slow: float = 1.0

    def seconds(self, costs: Costs, rows: Seq[int], contexts: Seq[int]) -> float:
        """Of a whole round without its draft: ``rows[i]`` rows of a request with ``contexts[i]`` tokens in its K/V."""
        forward = self.slow * costs.forward([1] * len(rows), contexts)
        if sum(rows) > len(rows):
            forward = max(forward, costs.forward(rows, contexts))
        return forward + self.fixed + self.each * len(rows)


class _Nothing(Drafter[None]):
    """Drafts nothing."""

    def begin(self, sequence: Sequence) -> None:
        return None

    def propose(self, state: None, budget: Budget) -> TokenTree:
        return TokenTree()


def measure_overhead(target: Target, params: SamplingParams | None = None) -> RoundOverhead:
    """Of autoregressive rounds of made-up prompts under ``params`` (None: greedy), as they take at this moment."""
    with stage("measuring rounds", brief=True):
        found = {batch: list(_rounds(target, batch, params or SamplingParams())) for batch in (_FEW, _MANY)}
    return overhead_of(found[_FEW], found[_MANY], target.costs)


def overhead_of(few: Seq[RoundRecord], many: Seq[RoundRecord], costs: Costs) -> RoundOverhead:
    """From rounds of a few requests and of many, as many in each of either."""
    beside = [median(one.verify_seconds - one.forward_seconds for one in rounds) for rounds in (few, many)]
    slow = [
        median(one.forward_seconds / costs.forward(one.rows, one.contexts) for one in rounds) for rounds in (few, many)
    ]
    counts = [len(rounds[0].requests) for rounds in (few, many)]
    each = max(0.0, (beside[1] - beside[0]) / (counts[1] - counts[0]))
    return RoundOverhead(max(0.0, beside[0] - counts[0] * each), each, sum(slow) / len(slow))


def _rounds(target: Target, batch: int, params: SamplingParams) -> Iterator[RoundRecord]:
    room = target.context_length
    length = max(1, min(_PROMPT, room // 2))
    tokens = max(1, min(_WARM + _TIMED, room - length))
    method = Method("none", _Nothing(), RecursiveRejection(), Fixed(0))
    prompts = [tuple((37 * at + 11 * number) % target.vocab_size for at in range(length)) for number in range(batch)]
    recorder = RoundRecorder(target, [Request(prompt, method, params, tokens) for prompt in prompts], batch)
    try:
        for number in range(tokens):
            found = recorder.step()
            if number >= min(_WARM, tokens - 1):
                yield found
    finally:
        recorder.close()

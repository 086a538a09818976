"""What rounds take beside what the cost table has for their forwards: measured in a second or two of real rounds.

The table has the quickest of a few forwards one after another. In a round tokens are chosen, K/V is committed, requests
are counted, for each of them: ``fixed`` seconds, and ``each`` for every request. What runs between two forwards leaves
them colder caches: a forward with a row for each request takes ``slow`` times what the table has. One with draft tokens
takes another number of times, since additional rows are computed while weights are waited for: ``busy`` at
:data:`DRAFTED` draft tokens a request, which rounds with made-up drafts tell, in turns with rounds without.
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
_WARM, _TIMED = 6, 80
"""Rounds."""
_TURN = 5
"""Rounds with drafts, or without, one after another; the first of them does not count, since caches and threads are as
rounds of the other kind have left them."""
DRAFTED = 7
"""Draft tokens of each request, in the rounds that have any."""


@dataclass(frozen=True, slots=True)
class RoundOverhead:
    """Of rounds beside their forward: ``fixed`` seconds, ``each`` for every request, and ``row`` for every draft token.
    ``slow`` and ``busy``: how many times as long a forward takes as the cost table has it, with a row for each request
    and with :data:`DRAFTED` more; linear in between."""

    fixed: float = 0.0
    each: float = 0.0
    slow: float = 1.0
    busy: float = 1.0
    row: float = 0.0

    def seconds(self, costs: Costs, rows: Seq[int], contexts: Seq[int]) -> float:
        """Of a whole round without its draft: ``rows[i]`` rows of a request with ``contexts[i]`` tokens in its K/V."""
        forward, more = self.slow * costs.forward([1] * len(rows), contexts), sum(rows) - len(rows)
        if more:  # no round is quicker for its draft tokens
            share = min(1.0, more / len(rows) / DRAFTED)
            factor = self.slow + share * (self.busy - self.slow)
            forward = max(forward, factor * costs.forward(rows, contexts))
        return forward + self.fixed + self.each * len(rows) + self.row * more


class _MadeUp(Drafter[list[int]]):
    """Drafts nothing for a turn of rounds, then made-up tokens for a turn. Its state counts the rounds."""

    def __init__(self, vocab_size: int) -> None:
        self._tokens = [(53 * at + 7) % vocab_size for at in range(DRAFTED)]

    def begin(self, sequence: Sequence) -> list[int]:
        return [0]

    def propose(self, state: list[int], budget: Budget) -> TokenTree:
        state[0] += 1
        drafting = (state[0] - 1) // _TURN % 2 and budget.depth >= DRAFTED
        return TokenTree.chain(self._tokens) if drafting else TokenTree()


def measure_overhead(target: Target, params: SamplingParams | None = None) -> RoundOverhead:
    """Of autoregressive rounds of made-up prompts under ``params`` (None: greedy), as they take at this moment."""
    with stage("measuring rounds", brief=True):
        found = {batch: list(_rounds(target, batch, params or SamplingParams())) for batch in (_FEW, _MANY)}
    return overhead_of(found[_FEW], found[_MANY], target.costs)


def overhead_of(few: Seq[RoundRecord], many: Seq[RoundRecord], costs: Costs) -> RoundOverhead:
    """From rounds of a few requests and of many. Without rounds that drafted, drafts are taken to slow nothing down."""
    plain = [[one for one in rounds if not one.draft_tokens] for rounds in (few, many)]
    drafting = [[one for one in rounds if min(one.drafted) == DRAFTED] for rounds in (few, many)]
    counts = [len(rounds[0].requests) for rounds in plain]
    beside = [_beside(rounds) for rounds in plain]
    each = max(0.0, (beside[1] - beside[0]) / (counts[1] - counts[0]))
    fixed = max(0.0, beside[0] - counts[0] * each)
    slow = _mean([_slow(rounds, costs) for rounds in plain])
    if not all(drafting):
        return RoundOverhead(fixed, each, slow)
    busy = _mean([_slow(rounds, costs) for rounds in drafting])
    more = [
        (_beside(rounds) - without) / (count * DRAFTED)
        for rounds, without, count in zip(drafting, beside, counts, strict=True)
    ]
    return RoundOverhead(fixed, each, slow, busy, max(0.0, _mean(more)))


def _beside(rounds: Seq[RoundRecord]) -> float:
    """Seconds beside the forward."""
    return median(one.verify_seconds - one.forward_seconds for one in rounds)


def _slow(rounds: Seq[RoundRecord], costs: Costs) -> float:
    """How many times as long forwards took as the table has them."""
    return median(one.forward_seconds / costs.forward(one.rows, one.contexts) for one in rounds)


def _mean(values: Seq[float]) -> float:
    return sum(values) / len(values)


def _rounds(target: Target, batch: int, params: SamplingParams) -> Iterator[RoundRecord]:
    room = target.context_length
    length = max(1, min(_PROMPT, room // 2))
    count = max(1, min(_WARM + _TIMED, room - length - DRAFTED - 1))
    method = Method("none", _MadeUp(target.vocab_size), RecursiveRejection(), Fixed(DRAFTED))
    prompts = [tuple((37 * at + 11 * number) % target.vocab_size for at in range(length)) for number in range(batch)]
    tokens = max(1, min(2 * (_WARM + _TIMED), room - length))  # a made-up draft token may be accepted now and then
    recorder = RoundRecorder(target, [Request(prompt, method, params, tokens) for prompt in prompts], batch)
    before = -1
    try:
        for number in range(count):
            found = recorder.step()
            counts = number >= _WARM and found.draft_tokens == before
            if counts or count <= _WARM + 1:  # in a context so short there is no choice
                yield found
            before = found.draft_tokens
    finally:
        recorder.close()

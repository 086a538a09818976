"""What a round takes beside its draft: by the number of draft tokens in the whole batch, measured in real rounds, and
by the contexts of its requests.

A probe drafts known tokens, so many in all as are asked for (:mod:`outpace.advice.probe`). Sizes take turns,
autoregressive rounds among them, so that a machine that grows slower changes no ratio; a turn is a few rounds, of which
the first does not count, since caches and threads are as another size has left them. A *block* is a turn of each size;
blocks are what intervals are resampled from.

Rounds differ by their contexts, too, and the requests whose drafts are accepted have longer ones than others. So every
round that is measured is divided by its *weight*: what the target's costs have for its rows and contexts, beside a
round with as many rows of requests of the usual context. Rounds that are predicted are multiplied by theirs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence as Seq
from itertools import count
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outpace.advice.probe import MOST_DRAFT_TOKENS, ProbeRounds
from outpace.engine.known_answers import KnownAnswer
from outpace.engine.round_records import RoundRecord
from outpace.targets.base import Target
from outpace.targets.costs import Costs, Scorer

Figures = NDArray[np.float64]

_EACH = 8
"""Most draft tokens that are measured of each of several requests."""
_FEWEST, _MOST = 4, 40
"""Blocks."""
_RUN, _SHORT_RUN = 5, 3
"""Rounds of a turn, and where rounds are so slow that there is no time for more."""
_STATE_BYTES = 4
_DISTURBED = 0.1
"""Share of the slowest rounds that do not count: other programs have run in them."""


class ContextWeights:
    """How contexts change what rounds of ``batch`` requests take, by the target's costs. ``usual``: tokens, whose
    weight is 1."""

    def __init__(self, costs: Costs, batch: int, usual: int) -> None:
        self._costs, self.batch, self.usual = costs, batch, usual

    def weight(self, rows: Seq[int], contexts: Seq[int]) -> float:
        """Of a round with ``rows[i]`` rows of a request whose K/V holds ``contexts[i]`` tokens."""
        beside, total = self._costs.overhead, sum(rows)
        usual = self._costs.even(total, self.batch, self.usual)
        return (self._costs.forward(rows, contexts) + beside) / (usual + beside)

    def of(self, one: RoundRecord) -> float:
        """How many times as long a round takes as with requests of the usual context."""
        return self.weight(one.rows, one.contexts)


def usual_context(answers: Seq[KnownAnswer]) -> int:
    """The mean number of tokens in the K/V of a request while it is answered."""
    rounds = sum(len(one.tokens) for one in answers)
    return round(sum(len(one.tokens) * (len(one.prompt) + len(one.tokens) / 2) for one in answers) / max(1, rounds))


class RoundCosts(Costs):
    """Seconds of rounds of ``batch`` requests of the usual context. ``sizes`` (S,): draft tokens of the whole batch,
    ascending from 0; ``blocks`` (B, S) seconds. Between sizes costs are linear, and beyond the largest they go on as
    before it. ``weights_of``: of other contexts; None: they do not count."""

    def __init__(
        self, batch: int, sizes: Seq[float], blocks: Figures, weights_of: ContextWeights | None = None
    ) -> None:
        self.weights_of = weights_of
        self.batch = batch
        self.sizes = np.asarray(sizes, float)
        self.blocks = np.asarray(blocks, float)
        self._steady = _steady(self.blocks)
        self._usual = _isotonic(np.median(self._steady, axis=0)[None, :])[0]

    @property
    def step(self) -> float:
        """Seconds of an autoregressive round."""
        return float(self._usual[0])

    def seconds(self, rows: int, context: int = 0) -> float:
        return float(self._usual @ self.weights(np.array([max(0, rows - self.batch)], float))[:, 0])

    def once(self, name: str, measure: Callable[[], float]) -> float:
        raise ValueError(f"rounds were measured once, and not '{name}'")

    def beside(self, model: Scorer, name: str) -> Costs:
        raise ValueError("rounds were measured of the target alone")

    def weight(self, one: RoundRecord) -> float:
        """How many times as long a round takes as with requests of the usual context."""
        return 1.0 if self.weights_of is None else self.weights_of.of(one)

    def of_rows(self, rows: Seq[int], contexts: Seq[int]) -> float:
        """Seconds of a round with ``rows[i]`` rows of a request whose K/V holds ``contexts[i]`` tokens."""
        weight = 1.0 if self.weights_of is None else self.weights_of.weight(rows, contexts)
        return weight * self.seconds(sum(rows))

    def plain_turns(self) -> Figures:
        """(B,): seconds of the turns of autoregressive rounds, of different moments."""
        found: Figures = self.blocks[:, 0]
        return found

    def slowdowns(self) -> Figures:
        """(B,): how many times as long as in the usual block rounds with a draft took in each, beside autoregressive
        ones."""
        if len(self.sizes) == 1:
            return np.ones(len(self.blocks))
        found: Figures = np.median(self.blocks[:, 1:] / self.blocks[:, :1] / self.relative_sizes()[1:], axis=1)
        return found

    def slowed(self, times: float) -> RoundCosts:
        """Where rounds with a draft take so many times as long beside autoregressive ones."""
        factors = np.where(self.sizes > 0, times, 1.0)
        return RoundCosts(self.batch, self.sizes.tolist(), self.blocks * factors, self.weights_of)

    def nearest_size(self, draft_tokens: float) -> int:
        """The measured size with drafts that is nearest."""
        sizes = self.sizes[self.sizes > 0]
        return int(sizes[np.argmin(np.abs(sizes - draft_tokens))])

    def weights(self, draft_tokens: Figures) -> Figures:
        """(S, K): what each measured size counts for rounds with ``draft_tokens`` (K,) in them."""
        found = np.zeros((len(self.sizes), len(draft_tokens)))
        if len(self.sizes) == 1:
            found[0] = 1.0
            return found
        above = np.clip(np.searchsorted(self.sizes, draft_tokens, side="left"), 1, len(self.sizes) - 1)
        low, high = self.sizes[above - 1], self.sizes[above]
        share = (draft_tokens - low) / (high - low)
        columns = np.arange(len(draft_tokens))
        found[above - 1, columns] = 1.0 - share
        found[above, columns] = share
        return found

    def relative_sizes(self) -> Figures:
        """(S,) in autoregressive rounds."""
        relative: Figures = self._usual / self._usual[0]
        return relative

    def resampled(self, generator: np.random.Generator, times: int) -> Figures:
        """(times, S): relative costs of blocks that were drawn with replacement."""
        drawn = generator.integers(len(self.blocks), size=(times, len(self.blocks)))
        usual = _isotonic(np.median(self._steady[drawn], axis=1))
        relative: Figures = usual / usual[:, :1]
        return relative


def _steady(blocks: Figures) -> Figures:
    """(B, S): blocks on a machine that is the same in all of them. One that is slow for the time of a block makes all
    of its sizes slow, and those with drafts more than autoregressive rounds, or less (:meth:`RoundCosts.slowdowns`)."""
    plain, drafts = blocks[:, :1], blocks[:, 1:]
    steady = [np.broadcast_to(np.median(plain), plain.shape)]
    if drafts.size:
        steady.append(drafts / np.median(drafts / np.median(drafts, axis=0), axis=1, keepdims=True))
    return np.concatenate(steady, axis=1)


def _isotonic(costs: Figures) -> Figures:
    """Costs (R, S) of ascending sizes, none below that of a smaller one: the nearest such rows in least squares.

    A size that was disturbed is drawn to its neighbours, where a running maximum would raise all larger ones.
    """
    count = costs.shape[1]
    sums = np.concatenate([np.zeros((len(costs), 1)), np.cumsum(costs, axis=1)], axis=1)
    found = np.full_like(costs, -np.inf)
    for begin in range(count):  # the largest, over where a span begins, of the least mean over where it ends
        means = (sums[:, begin + 1 :] - sums[:, [begin]]) / np.arange(1, count - begin + 1)
        least = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
        found[:, begin:] = np.maximum(found[:, begin:], least)
    return found


def mean_undisturbed(times: Figures, drawn: NDArray[np.int64] | None = None) -> Figures:
    """Mean of times of rounds, of which the longest count as those that most do not exceed: of each resample ``drawn``,
    or of all, (1,)."""
    kept = times if len(times) < 1.0 / _DISTURBED else np.minimum(times, np.quantile(times, 1.0 - _DISTURBED))
    found: Figures = np.mean(kept[None, :] if drawn is None else kept[drawn], axis=1)
    return found


def probed_sizes(batch: int) -> tuple[int, ...]:
    """The numbers of draft tokens that are measured for a batch."""
    if batch == 1:
        return (0, 1, 2, 3, 4, 6, 8, 12, 16, MOST_DRAFT_TOKENS)
    least = {max(1, batch // 4), max(1, batch // 2)}
    return tuple(sorted({0, *least, batch, 2 * batch, 4 * batch, _EACH * batch}))


def measure_rounds(target: Target, answers: Seq[KnownAnswer], batch: int, seconds: float) -> RoundCosts:
    """Costs of rounds of ``batch`` requests on the contexts of ``answers``, in ``seconds`` or a little more."""
    sizes = probed_sizes(batch)
    weights_of = ContextWeights(target.costs, batch, usual_context(answers))
    for size in sizes:  # what is not known yet is measured before any round is
        target.costs.even(batch + size, batch, weights_of.usual)
    rounds = ProbeRounds(target, answers, batch, weights_of.of)
    blocks: list[list[float]] = []
    shuffle = random.Random(batch)
    began = perf_counter()
    try:
        run = 2
        for number in count():
            spent = perf_counter() - began
            if (spent > seconds and number > _FEWEST) or number > _MOST:
                break
            if number == 1:
                run = _RUN if spent / run * _RUN * 2 * _FEWEST < seconds else _SHORT_RUN
            order = list(sizes)
            shuffle.shuffle(order)
            found = {size: rounds.turn(size, run) for size in order}
            if number:  # the first rounds compile, allocate and page in
                blocks.append([found[size] for size in sizes])
    finally:
        rounds.close()
    return RoundCosts(batch, sizes, np.array(blocks), weights_of)


def fits(target: Target, batch: int, tokens: int, free: int) -> bool:
    """Whether K/V of ``batch`` requests of ``tokens`` tokens each fit into ``free`` bytes, where that is known."""
    return batch * target.kv_bytes(None, tokens) <= free


def kept_bytes(target: Target, lengths: Seq[int], layers: int) -> int:
    """K/V of answers that are kept, of so many tokens with their prompts, and their hidden states of ``layers``
    layers."""
    states = sum(lengths) * layers * target.hidden_size * _STATE_BYTES
    return sum(target.kv_bytes(None, one) for one in lengths) + states

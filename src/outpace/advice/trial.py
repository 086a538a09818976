"""Trials: a few real rounds of a candidate, by turns with autoregressive rounds of as many requests.

A turn is several rounds, and its first one does not count: drafts and forwards find the caches as rounds of the same
method leave them. Trials show what replays cannot: what drafting takes when the target has run in between, and how much
longer the candidate's rounds take than those of a probe with as many draft tokens and the same contexts. Nothing of
acceptance is read from them. Resamples draw turns, and rounds within them: a machine that is slow is so for a while.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outpace.advice.round_costs import Figures, RoundCosts
from outpace.engine.known_answers import KnownAnswer
from outpace.engine.method import Method
from outpace.engine.request import Generation
from outpace.engine.round_records import RoundRecorder
from outpace.engine.worth_drafting import forget
from outpace.targets.base import Target

Indices = NDArray[np.int64]

_TURN = 6
_FEWEST, _MOST = 8, 150
"""Rounds."""
_PATIENCE, _TURNS = 4.0, 4
"""How many times its seconds a trial goes on for the fewest rounds, and for how many turns at least: in a large batch
of short answers a request may join in every round."""
_SHRINKAGE = 2.0
"""Rounds that a kind of rounds counts beside those that were tried, which take what the probe's take."""
_DISTURBED = 0.1
"""Share of the slowest rounds that do not count: other programs have run in them."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Rounds of one candidate, in none of which a request joined: (rounds,) each.

    ``plain``: seconds of the autoregressive rounds beside it; ``drafted``: draft tokens of the batch; ``drafting``,
    ``verifying``: seconds, of these and of ``plain`` those of rounds with the usual contexts. ``turns``: the number of
    the turn, ascending. ``joining``: seconds that drafting takes more in the round in which a request joins, for
    each request: its prompt is read.
    """

    plain: Figures
    drafted: Figures
    drafting: Figures
    verifying: Figures
    joining: float
    turns: Indices

    def excess(self, costs: RoundCosts, drawn: Indices | None = None) -> Figures:
        """How many times as long rounds take as the probe's with as many draft tokens: those without a draft, and those
        with one, (resamples, 2), of each resample ``drawn`` (resamples, rounds), or of all rounds, (1, 2).

        What copies drafts in few of its rounds: a median over all of them would say nothing of these.
        """
        expected = costs.relative_sizes() @ costs.weights(self.drafted)
        ratios = self.verifying / (self.plain * expected)
        if drawn is None:
            drawn = np.arange(len(ratios))[None, :]
        kinds = [self.drafted <= 0, self.drafted > 0]
        return np.stack([_shrunk_median(ratios[drawn], kind[drawn]) for kind in kinds], axis=1)

    def draft_steps(self, drawn: Indices | None = None) -> Figures:
        """What drafting takes in a round, in autoregressive rounds; as for :meth:`excess`."""
        return mean_undisturbed(self.drafting / np.median(self.plain), drawn)

    def resampled(self, generator: np.random.Generator, times: int) -> Indices:
        """(times, rounds): the rounds of each resample, of turns that were drawn first."""
        _, begins, sizes = np.unique(self.turns, return_index=True, return_counts=True)
        drawn = generator.integers(len(begins), size=(times, len(begins)))
        of = drawn[:, np.arange(len(self.plain)) * len(begins) // len(self.plain)]
        found: Indices = begins[of] + (generator.random(of.shape) * sizes[of]).astype(np.int64)
        return found

    def plain_turns(self) -> Figures:
        """(turns,): seconds of the autoregressive rounds of each turn."""
        _, begins = np.unique(self.turns, return_index=True)
        found: Figures = self.plain[begins]
        return found


def _shrunk_median(ratios: Figures, chosen: NDArray[np.bool_]) -> Figures:
    """(R,): of the chosen ratios of each row (R, n), drawn to 1 where there are few of them."""
    count = chosen.sum(axis=1)
    ordered = np.sort(np.where(chosen, ratios, np.inf), axis=1)
    rows = np.arange(len(ratios))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, count // 2]
    middle = np.where(count > 0, 0.5 * (low + high), 1.0)
    found: Figures = middle ** (count / (count + _SHRINKAGE))
    return found


def undisturbed(times: Figures) -> Figures:
    """Times of rounds, of which the longest count as those that most do not exceed."""
    if len(times) < 1.0 / _DISTURBED:
        return times
    found: Figures = np.minimum(times, np.quantile(times, 1.0 - _DISTURBED))
    return found


def mean_undisturbed(times: Figures, drawn: Indices | None = None) -> Figures:
    """Their mean, the longest cut as :func:`undisturbed` does: of each resample ``drawn``, or of all, (1,)."""
    kept = undisturbed(times)
    found: Figures = np.mean(kept[None, :] if drawn is None else kept[drawn], axis=1)
    return found


def run_trial(
    target: Target, answers: Seq[KnownAnswer], method: Method, plain: Method, costs: RoundCosts, seconds: float
) -> Trial | None:
    """Rounds of ``method`` and of autoregressive decoding (``plain``), by turns, for ``seconds`` or a little more.
    ``costs``: of rounds of as many requests. None: requests joined in nearly all rounds, too few others were seen."""
    batch = costs.batch
    ours = RoundRecorder(target, [one.request(method) for one in answers], batch)
    theirs = RoundRecorder(target, [one.request(plain) for one in answers], batch)
    rows: list[tuple[float, float, float, float, float]] = []
    joining: list[tuple[int, float]] = []
    known: list[Generation] = []
    number = 0
    began = perf_counter()
    try:
        while len(rows) < _MOST:
            spent = perf_counter() - began
            if len(rows) >= _FEWEST and (spent >= seconds or ours.done):
                break
            if number >= _TURNS and spent >= _PATIENCE * seconds:
                break
            turn = [theirs.step() for _ in range(_TURN)]
            beside = float(np.median([one.verify_seconds / costs.weight(one) for one in turn[1:]]))
            number += 1
            forget(method.drafter)  # what drafting takes is asked, not whether it pays
            for place in range(_TURN):
                running = ours.running()
                joined = sum(all(one is not other for other in known) for one in running)
                known = running
                found = ours.step()
                if joined:
                    joining.append((joined, found.draft_seconds))
                elif place:
                    verifying = found.verify_seconds / costs.weight(found)
                    rows.append((beside, found.draft_tokens, found.draft_seconds, verifying, number))
    finally:
        ours.close()
        theirs.close()
    if len(rows) < _FEWEST:
        return None
    columns = np.array(rows, float).T
    usual = float(np.median(columns[2]))
    count, spent = joining[0]
    joins = max(0.0, spent - usual) / count
    return Trial(columns[0], columns[1], columns[2], columns[3], joins, columns[4].astype(np.int64))

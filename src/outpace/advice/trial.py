"""Trials: a few real rounds of a candidate, by turns with autoregressive rounds of as many requests, and with rounds of
a probe that drafts about as many tokens as the candidate has.

A turn is several rounds, and its first one does not count: drafts and forwards find the caches as rounds of the same
method leave them. Trials show what replays cannot: what drafting takes when the target has run in between, and how much
longer the candidate's rounds take than the probe's, which drafts known tokens. Nothing of acceptance is read from them.
Resamples draw turns, and rounds within them: a machine that is slow is so for a while.

The probe also shows how much longer rounds with drafts take at the time of the trial than when costs were measured.
A processor that is shared with others is slow for many rows at some moments and not at others, and less so for few; it
stays so for seconds to minutes. That is the machine's doing and not the candidate's, so all predictions of a batch
share what all of its trials have seen (:func:`outpace.advice.prediction.predict`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outpace.advice.probe import ProbeRounds
from outpace.advice.round_costs import Figures, RoundCosts, mean_undisturbed
from outpace.engine.known_answers import KnownAnswer
from outpace.engine.method import Method
from outpace.engine.request import Generation
from outpace.engine.round_records import RoundRecorder
from outpace.engine.worth_drafting import forget
from outpace.targets.base import Target

Indices = NDArray[np.int64]

_TURN, _BESIDE = 6, 4
"""Rounds of the candidate and autoregressive ones in a turn, and of the probe with a draft."""
_FEWEST, _MOST = 8, 150
"""Rounds of the candidate."""
_PATIENCE, _TURNS = 4.0, 4
"""How many times its seconds a trial goes on for the fewest rounds, and for how many turns at least: in a large batch
of short answers a request may join in every round."""
_SHRINKAGE = 2.0
"""Rounds that a kind of rounds counts beside those that were tried, which take what the probe's take."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Rounds of one candidate, in none of which a request joined: (rounds,) each.

    ``plain``: seconds of the autoregressive rounds beside it; ``drafted``: draft tokens of the batch; ``drafting``,
    ``verifying``: seconds, of these and of ``plain`` those of rounds with the usual contexts. ``turns``: the number of
    the turn, ascending. ``slowdown``: how many times as long as when costs were measured the probe's rounds with a
    draft took in the turn, in autoregressive rounds. ``joining``: seconds that drafting takes more in the round in
    which a request joins, for each request: its prompt is read.
    """

    plain: Figures
    drafted: Figures
    drafting: Figures
    verifying: Figures
    turns: Indices
    slowdown: Figures
    joining: float = 0.0

    def excess(self, costs: RoundCosts, drawn: Indices | None = None) -> Figures:
        """How many times as long rounds take as the probe's with as many draft tokens: those without a draft, and those
        with one, (resamples, 2), of each resample ``drawn`` (resamples, rounds), or of all rounds, (1, 2).

        What copies drafts in few of its rounds: a median over all of them would say nothing of these.
        """
        expected = costs.relative_sizes() @ costs.weights(self.drafted)
        slowdown = np.where(self.drafted > 0, self.slowdown, 1.0)
        ratios = self.verifying / (self.plain * expected * slowdown)
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
        return self._once_a_turn(self.plain)

    def slowdowns(self) -> Figures:
        """(turns,): of the machine."""
        return self._once_a_turn(self.slowdown)

    def _once_a_turn(self, figures: Figures) -> Figures:
        _, begins = np.unique(self.turns, return_index=True)
        found: Figures = figures[begins]
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


def run_trial(
    target: Target, answers: Seq[KnownAnswer], method: Method, costs: RoundCosts, seconds: float
) -> Trial | None:
    """Rounds of ``method`` and of a probe, by turns, for ``seconds`` or a little more. ``costs``: of rounds of as many
    requests. None: requests joined in nearly all rounds, too few others were seen."""
    batch = costs.batch
    ours = RoundRecorder(target, [one.request(method) for one in answers], batch)
    probe = ProbeRounds(target, answers, batch, costs.weight)
    rows: list[tuple[float, float, float, float, float, float]] = []
    joining: list[tuple[int, float]] = []
    known: list[Generation] = []
    number, typical = 0, costs.nearest_size(2 * batch)
    began = perf_counter()
    try:
        while len(rows) < _MOST:
            spent = perf_counter() - began
            if len(rows) >= _FEWEST and (spent >= seconds or ours.done):
                break
            if number >= _TURNS and spent >= _PATIENCE * seconds:
                break
            plain = probe.turn(0, _TURN)
            number += 1
            forget(method.drafter)  # what drafting takes is asked, not whether it pays
            turn: list[tuple[int, float, float]] = []
            for place in range(_TURN):
                running = ours.running()
                joined = sum(all(one is not other for other in known) for one in running)
                known = running
                found = ours.step()
                if joined:
                    joining.append((joined, found.draft_seconds))
                elif place:
                    turn.append((found.draft_tokens, found.draft_seconds, found.verify_seconds / costs.weight(found)))
            # What costs are between sizes is a guess, and that is the candidate's excess.
            typical = costs.nearest_size(float(np.median([size for size, _, _ in turn if size] or [typical])))
            expected = plain * costs.seconds(batch + typical) / costs.step
            slowdown = probe.turn(typical, _BESIDE) / expected
            rows += [(plain, *each, number, slowdown) for each in turn]
    finally:
        ours.close()
        probe.close()
    if len(rows) < _FEWEST:
        return None
    columns = np.array(rows, float).T
    usual = float(np.median(columns[2]))
    count, spent = joining[0]
    joins = max(0.0, spent - usual) / count
    plain, drafted, drafting, verifying, turns, slowdown = columns
    return Trial(plain, drafted, drafting, verifying, turns.astype(np.int64), slowdown, joins)

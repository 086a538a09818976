"""Prediction: from rounds that were played, and what rounds and drafts take, to a speed-up with its interval.

A speed-up is that of ``outpace bench``: both methods give the same tokens, so it is the ratio of their decoding times,
the round of each request's first token left out, in which its prompt is read. Times are in autoregressive rounds of the
batch, as those of :mod:`outpace.controllers.predictor`, whose forecast of the mean round gives the same ratio.

The interval is that of the speed-up that is measured on as many other prompts of the same kind. It is a percentile
bootstrap over everything that was measured: prompts (acceptance; twice, as the others vary too), blocks of rounds (what
rows cost), rounds of the trial (what drafting costs). :data:`MODEL_ERROR` is added for what none of them contains.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.advice.round_costs import Figures, RoundCosts
from outpace.advice.trial import Indices, Trial
from outpace.controllers.predictor import Forecast
from outpace.engine.known_answers import KnownAnswer
from outpace.engine.round_records import UNCOUNTED, RoundRecord
from outpace.engine.teacher_forcing import ChainRounds, chain_rounds

LEVEL = 0.9
RESAMPLES = 2000
MODEL_ERROR = 0.05
"""Standard deviation of the logarithm of measured over predicted speed-ups that resampling does not explain
(``python benchmarks/advice_check.py``)."""
_INSTANT = 1e-3
"""Autoregressive rounds: answers that end with their first round take no time after it."""
FREE = 0.03
"""Autoregressive rounds: drafting that takes less in a round is what trials say; its replays are all noise."""
UNTRIED = 0.1
"""The same of a candidate whose drafting was not timed in real rounds."""


@dataclass(frozen=True, slots=True)
class Played:
    """What decoding each of the answers takes, after its first round.

    ``steps`` (N,): autoregressive rounds. ``rounds`` (N, K): rounds with ``sizes`` (K,) draft tokens in the whole
    batch. ``drafting`` (N,): seconds of drafting in them, as they were replayed; NaN where drafting was not run.
    ``early``: seconds of drafting of each round in which nobody joined, in their order. ``joins``: requests that join
    while others decode, where the rounds do not show it.
    """

    steps: Figures
    rounds: Figures
    sizes: Figures
    drafting: Figures
    early: Figures
    joins: int = 0

    @property
    def tokens_per_round(self) -> float:
        """Of a request."""
        return float(self.steps.sum() / max(self.rounds.sum(), 1e-9))


def of_records(answers: Seq[KnownAnswer], records: Seq[RoundRecord]) -> Played:
    """From the rounds of a batch. ``answers``: those that were decoded, in the records' numbers."""
    sizes = sorted({one.draft_tokens for one in records})
    at = {size: index for index, size in enumerate(sizes)}
    rounds = np.zeros((len(answers), len(sizes)))
    drafting, seen, early = np.zeros(len(answers)), set[int](), list[float]()
    tokens = np.zeros(len(answers))
    for one in records:
        fresh = [number for number in one.requests if number != UNCOUNTED and number not in seen]
        seen.update(fresh)
        # A request that only keeps a place joins unnoticed; there are few.
        if not fresh:
            early.append(one.draft_seconds)
        for number, count in zip(one.requests, one.committed, strict=True):
            if number == UNCOUNTED:
                continue
            tokens[number] += count
            if number not in fresh:
                rounds[number, at[one.draft_tokens]] += 1
                drafting[number] += one.draft_seconds
    return Played(tokens - 1.0, rounds, np.array(sizes, float), drafting, np.array(early))


def of_chains(ratios: Seq[Seq[float]], length: int, batch: int) -> Played:
    """Chains of a draft model, from likelihood ratios of the answers' tokens (:mod:`outpace.engine.teacher_forcing`).

    In a batch all requests draft about as much at once.
    """
    found: list[ChainRounds] = [chain_rounds(one, length) for one in ratios]
    rounds = np.array([one.rounds for one in found])
    drafted = sum(one.draft_tokens for one in found) / max(rounds.sum(), 1e-9)
    steps = np.array([len(one) - 1.0 for one in ratios])
    nothing = np.full(len(found), np.nan)
    joins = max(0, len(found) - batch)
    return Played(steps, rounds[:, None], np.array([batch * drafted]), nothing, np.array([]), joins)


@dataclass(frozen=True, slots=True)
class Prediction:
    """``speedup`` over autoregressive decoding with its 90 % ``interval``; ``samples``: resampled speed-ups.

    ``forecast``: the mean round. ``draft_steps``: of it, what drafting takes.
    """

    speedup: float
    interval: tuple[float, float]
    forecast: Forecast
    draft_steps: float
    samples: Figures = field(repr=False)

    def public(self) -> dict[str, Any]:
        return {
            "speedup": self.speedup,
            "interval": list(self.interval),
            "tokens_per_round": self.forecast.tokens,
            "round_steps": self.forecast.steps,
            "draft_steps": self.draft_steps,
        }


def predict(
    played: Played,
    costs: RoundCosts,
    trial: Trial | None,
    *,
    draft_steps: float | None = None,
    seed: int = 0,
    error: float | None = None,
) -> Prediction:
    """The speed-up of what was played.

    ``draft_steps``: what drafting takes in a round, in autoregressive rounds, where it was neither replayed nor tried.
    ``error``: in place of :data:`MODEL_ERROR`.
    """
    generator = np.random.default_rng(seed)  # the same prompts and blocks in each resample of all candidates
    count = len(played.steps)
    alike = np.full(count, 1.0 / count)
    seen, others = generator.multinomial(count, alike, size=(2, RESAMPLES)).astype(float)
    relative = costs.resampled(generator, RESAMPLES)
    drawn = None if trial is None else trial.resampled(generator, RESAMPLES)
    noise = error if error is not None else (MODEL_ERROR if trial is not None else UNTRIED)
    shaken = np.exp(noise * generator.standard_normal(RESAMPLES))
    whole = np.ones((1, count))
    usual = costs.relative_sizes()[None, :]
    verify, draft = _times(played, costs, trial, draft_steps, whole, usual, None)
    point = float(played.steps.sum() / max((verify + draft)[0], _INSTANT))
    verifying, drafting = _times(played, costs, trial, draft_steps, seen, relative, drawn)
    samples: Figures = shaken * (seen @ played.steps) / np.maximum(verifying + drafting, _INSTANT)
    # The prompts to come vary as those that were seen do.
    verifying, drafting = _times(played, costs, trial, draft_steps, others, usual, None)
    samples *= (others @ played.steps) / np.maximum(verifying + drafting, _INSTANT) / point
    low, high = np.quantile(samples, [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0])
    rounds = max(float(played.rounds.sum()), 1e-9)
    mean = Forecast(played.tokens_per_round, float(verify[0] + draft[0]) / rounds)
    return Prediction(point, (float(low), float(high)), mean, float(draft[0]) / rounds, samples)


def _times(
    played: Played,
    costs: RoundCosts,
    trial: Trial | None,
    draft_steps: float | None,
    shares: Figures,
    relative: Figures,
    drawn: Indices | None,
) -> tuple[Figures, Figures]:
    """Autoregressive rounds that verifying and drafting take, (resamples,) each."""
    rounds = shares @ played.rounds
    each = relative @ costs.weights(played.sizes)
    excess = 1.0 if trial is None else trial.excess(costs, drawn)
    verifying: Figures = excess * (rounds * each).sum(axis=1)
    return verifying, _drafting(played, costs, trial, draft_steps, shares, rounds.sum(axis=1), drawn)


def _drafting(
    played: Played,
    costs: RoundCosts,
    trial: Trial | None,
    draft_steps: float | None,
    shares: Figures,
    rounds: Figures,
    drawn: Indices | None,
) -> Figures:
    replayed = not np.isnan(played.drafting).any()
    if draft_steps is not None:
        return rounds * draft_steps
    if trial is None:
        found: Figures = shares @ np.nan_to_num(played.drafting) / costs.step
        return found
    tried = trial.draft_steps(drawn)
    if not replayed:
        joining = trial.joining / float(np.median(trial.plain)) * (costs.batch - 1) * played.joins
        spent: Figures = rounds * tried + joining * shares.sum(axis=1) / shares.shape[1]
        return spent
    # What the same first rounds took when they were replayed, with the target's forward in nobody's caches.
    early = played.early[: len(trial.plain)]
    usual = float(np.mean(early)) / costs.step if len(early) else 0.0
    if usual < FREE:
        return rounds * tried
    scale = np.clip(tried / usual, 0.5, 8.0)
    scaled: Figures = scale * (shares @ played.drafting) / costs.step
    return scaled

"""Prediction: from rounds that were played, and what rounds and drafts take, to a speed-up with its interval.

A speed-up is that of ``outpace bench``: both methods give the same tokens, so it is the ratio of their decoding times,
the round of each request's first token left out, in which its prompt is read. Both times are summed over the played
rounds, each with its own draft tokens and contexts (:mod:`outpace.advice.round_costs`), not taken of a mean round:
drafts are accepted where contexts are long. Times are in autoregressive rounds of the batch with the usual contexts, as
those of :mod:`outpace.controllers.predictor`.

The interval is that of the speed-up that is measured on as many other prompts of the same kind. It is a percentile
bootstrap over everything that was measured: prompts (acceptance; twice, as the others vary too), blocks of rounds (what
rows cost), turns of the trial (what drafting costs), and moments of the machine, which is slower for rounds with drafts
at some than at others (twice, as the measurement has moments of its own). The machine's noise, as the turns of
autoregressive rounds have shown it within the run, is added for the measurement to come (:func:`machine_noise`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.advice.round_costs import Figures, RoundCosts, mean_undisturbed
from outpace.advice.trial import Indices, Trial
from outpace.controllers.predictor import Forecast
from outpace.engine.known_answers import KnownAnswer
from outpace.engine.round_records import UNCOUNTED, RoundRecord
from outpace.engine.teacher_forcing import ChainRounds, chain_rounds

LEVEL = 0.9
RESAMPLES = 2000
_INSTANT = 1e-3
"""Autoregressive rounds: answers that end with their first round take no time after it."""
FREE = 0.03
"""Autoregressive rounds: drafting that takes less in a round is what trials say; its replays are all noise."""
_STRETCH = 6
"""Rounds of a replay that are resampled together."""
_STATE = 3
"""Moments of the machine, likewise: it often stays as it is from one trial to the next."""
UNTRIED = 0.1
"""Standard deviation of the logarithm of measured over predicted speed-ups of a candidate whose rounds were not tried,
where no other candidate's were either."""


@dataclass(frozen=True, slots=True)
class Played:
    """What decoding each of the answers takes, after its first round.

    ``steps`` (N,): its tokens after those of the first round, as many autoregressive rounds. ``plain`` (N,): these
    rounds, each counted by its weight: 1 for one with the usual contexts. ``rounds`` (N, K): rounds of the method
    with ``sizes`` (K,) draft tokens in the whole batch, by weight; ``count`` (N,): their number, and ``asked``
    (N,): in how many of them drafts were asked for. ``drafting`` (N,): seconds of drafting in them, as they were
    replayed; NaN where drafting was not run. ``early``: seconds of drafting of each round in which drafts were
    asked for and nobody joined, in their order. ``joins``: requests that join while others decode, where the rounds
    do not show it.
    """

    steps: Figures
    plain: Figures
    rounds: Figures
    count: Figures
    asked: Figures
    sizes: Figures
    drafting: Figures
    early: Figures
    joins: int = 0

    @property
    def tokens_per_round(self) -> float:
        """Of a request."""
        return float(self.steps.sum() / max(self.count.sum(), 1e-9))


def plain_rounds(answers: Seq[KnownAnswer], records: Seq[RoundRecord], costs: RoundCosts) -> Figures:
    """(N,): autoregressive rounds of each answer after its first one, by weight."""
    found: Figures = of_records(answers, records, costs).rounds.sum(axis=1)
    return found


def of_records(
    answers: Seq[KnownAnswer], records: Seq[RoundRecord], costs: RoundCosts, plain: Figures | None = None
) -> Played:
    """From the rounds of a batch. ``answers``: those that were decoded, in the records' numbers. ``plain``: of
    :func:`plain_rounds`; None: contexts do not count."""
    sizes = sorted({one.draft_tokens for one in records})
    at = {size: index for index, size in enumerate(sizes)}
    rounds, count = np.zeros((len(answers), len(sizes))), np.zeros(len(answers))
    asked = np.zeros(len(answers))
    drafting, seen, early = np.zeros(len(answers)), set[int](), list[float]()
    tokens = np.zeros(len(answers))
    for one in records:
        fresh = [number for number in one.requests if number != UNCOUNTED and number not in seen]
        seen.update(fresh)
        weight = costs.weight(one)
        # A request that only keeps a place joins unnoticed; there are few.
        if not fresh and not one.rested:
            early.append(one.draft_seconds)
        for number, committed in zip(one.requests, one.committed, strict=True):
            if number == UNCOUNTED:
                continue
            if number not in fresh:
                tokens[number] += committed
                rounds[number, at[one.draft_tokens]] += weight
                count[number] += 1
                asked[number] += not one.rested
                drafting[number] += one.draft_seconds
    base = _plain_of(tokens, plain, [len(one.tokens) for one in answers])
    return Played(tokens, base, rounds, count, asked, np.array(sizes, float), drafting, np.array(early))


def of_chains(
    answers: Seq[KnownAnswer], ratios: Seq[Seq[float]], length: int, costs: RoundCosts, plain: Figures | None = None
) -> Played:
    """Chains of a draft model, from likelihood ratios of the answers' tokens (:mod:`outpace.engine.teacher_forcing`).

    In a batch all requests draft about as much at once. ``plain``: as for :func:`of_records`.
    """
    found: list[ChainRounds] = [chain_rounds(one, length) for one in ratios]
    count = np.array([one.rounds for one in found])
    drafted = sum(one.draft_tokens for one in found) / max(count.sum(), 1e-9)
    weights = np.array([_chain_weight(one, length, costs) for one in answers])
    steps = np.array([one.tokens for one in found])
    nothing = np.full(len(found), np.nan)
    joins = max(0, len(found) - costs.batch)
    sizes = np.array([costs.batch * drafted])
    rounds = (count * weights)[:, None]
    base = _plain_of(steps, plain, [len(one) for one in ratios])
    return Played(steps, base, rounds, count, count, sizes, nothing, np.array([]), joins)


def _plain_of(steps: Figures, plain: Figures | None, lengths: Seq[int]) -> Figures:
    """Autoregressive rounds, by weight, of ``steps`` tokens of answers of ``lengths``, whose rounds after the first one
    ``plain`` are: neither the rest of a first round with a draft nor an answer that was drawn anew is as long."""
    return steps if plain is None else plain * steps / np.maximum(1.0, np.array(lengths) - 1.0)


def _chain_weight(answer: KnownAnswer, length: int, costs: RoundCosts) -> float:
    """Of a round in which this answer is decoded, with others of the usual context."""
    if costs.weights_of is None:
        return 1.0
    own = len(answer.prompt) + len(answer.tokens) // 2
    contexts = [own, *[costs.weights_of.usual] * (costs.batch - 1)]
    return costs.weights_of.weight([1 + length] * costs.batch, contexts)


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


def machine_noise(turns: Seq[Figures]) -> float:
    """Standard deviation of the logarithm of what the same rounds take at one moment and at another.

    ``turns``: seconds of turns of autoregressive rounds of one kind, several kinds. 0 where there is nothing to
    compare.
    """
    apart = [np.log(one / np.median(one)) for one in turns if len(one) > 1]
    if not apart:
        return 0.0
    free = sum(len(one) - 1 for one in apart)
    return float(np.sqrt(sum(float((one - one.mean()) @ (one - one.mean())) for one in apart) / free))


def predict(
    played: Played,
    costs: RoundCosts,
    trial: Trial | None,
    *,
    draft_steps: float | None = None,
    slowdowns: Seq[float] = (1.0,),
    seed: int = 0,
    noise: float = 0.0,
    untried: float = 0.0,
) -> Prediction:
    """The speed-up of what was played.

    ``draft_steps``: what drafting takes in a round, in autoregressive rounds, where it was neither replayed nor tried.
    ``slowdowns``: how many times as long as by ``costs`` rounds with drafts took beside autoregressive ones, at
    different moments in their order.
    ``noise``: of the machine (:func:`machine_noise`). A measurement decodes as many prompts as run at once in one
    stretch of time, with the method and without; its noise is the mean of so many. ``untried``: standard deviation of
    the logarithm of what a trial would have changed, where there was none.
    """
    generator = np.random.default_rng(seed)  # the same prompts and blocks in each resample of all candidates
    count = len(played.steps)
    alike = np.full(count, 1.0 / count)
    seen, others = generator.multinomial(count, alike, size=(2, RESAMPLES)).astype(float)
    relative = costs.resampled(generator, RESAMPLES)
    moments = np.array(slowdowns)
    stretch = max(1, min(_STATE, len(moments) // 2))
    ours, theirs = (moments[_blocks(generator, len(moments), stretch)].mean(axis=1) for _ in range(2))
    slow = moments.mean(keepdims=True)
    drawn = None if trial is None else trial.resampled(generator, RESAMPLES)
    early = None if trial is None else played.early[: len(trial.plain)]
    once = again = np.zeros(1)
    if early is not None and len(early):
        once, again = mean_undisturbed(early), mean_undisturbed(early, _blocks(generator, len(early)))
    spread = np.hypot(noise * np.sqrt(2.0 / max(1.0, count / costs.batch)), untried if trial is None else 0.0)
    shaken = np.exp(spread * generator.standard_normal(RESAMPLES))
    whole = np.ones((1, count))
    usual = costs.relative_sizes()[None, :]
    verify, draft = _times(played, costs, trial, draft_steps, whole, usual, slow, None, once)
    point = float(played.plain.sum() / max((verify + draft)[0], _INSTANT))
    verifying, drafting = _times(played, costs, trial, draft_steps, seen, relative, ours, drawn, again)
    samples: Figures = shaken * (seen @ played.plain) / np.maximum(verifying + drafting, _INSTANT)
    # The prompts to come vary as those that were seen do.
    verifying, drafting = _times(played, costs, trial, draft_steps, others, usual, theirs, None, once)
    samples *= (others @ played.plain) / np.maximum(verifying + drafting, _INSTANT) / point
    low, high = np.quantile(samples, [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0])
    # Of a mean round, in mean autoregressive ones.
    rounds = max(float(played.count.sum()), 1e-9) * float(played.plain.sum() / max(played.steps.sum(), 1e-9))
    mean = Forecast(played.tokens_per_round, float(verify[0] + draft[0]) / max(rounds, 1e-9))
    return Prediction(point, (float(low), float(high)), mean, float(draft[0]) / max(rounds, 1e-9), samples)


def _times(
    played: Played,
    costs: RoundCosts,
    trial: Trial | None,
    draft_steps: float | None,
    shares: Figures,
    relative: Figures,
    slow: Figures,
    drawn: Indices | None,
    early: Figures,
) -> tuple[Figures, Figures]:
    """Autoregressive rounds that verifying and drafting take, (resamples,) each. ``slow``: how many times as long as by
    ``relative`` rounds with drafts take. ``early``: seconds that drafting took in the replays of a trial's rounds,
    (resamples,) or (1,)."""
    rounds = shares @ played.rounds
    each = relative @ costs.weights(played.sizes)
    excess = np.ones((1, 2)) if trial is None else trial.excess(costs, drawn)
    machine = np.where(played.sizes > 0, slow[:, None], 1.0)
    verifying: Figures = (rounds * each * machine * excess[:, (played.sizes > 0).astype(int)]).sum(axis=1)
    return verifying, _drafting(played, costs, trial, draft_steps, shares, shares @ played.asked, drawn, early)


def _drafting(
    played: Played,
    costs: RoundCosts,
    trial: Trial | None,
    draft_steps: float | None,
    shares: Figures,
    rounds: Figures,
    drawn: Indices | None,
    early: Figures,
) -> Figures:
    replayed = not np.isnan(played.drafting).any()
    if draft_steps is not None:
        return rounds * draft_steps
    if trial is None:
        found: Figures = shares @ played.drafting / costs.step
        return found
    tried = trial.draft_steps(drawn)
    if not replayed:
        joining = trial.joining / float(np.median(trial.plain)) * (costs.batch - 1) * played.joins
        spent: Figures = rounds * tried + joining * shares.sum(axis=1) / shares.shape[1]
        return spent
    # What the same first rounds took when they were replayed, with the target's forward in nobody's caches.
    usual = early / costs.step
    if np.median(usual) < FREE:
        return rounds * tried
    scale = np.clip(tried / np.maximum(usual, _INSTANT), 0.5, 8.0)
    scaled: Figures = scale * (shares @ played.drafting) / costs.step
    return scaled


def _blocks(generator: np.random.Generator, count: int, stretch: int = _STRETCH) -> Indices:
    """(RESAMPLES, count): rounds of each resample, drawn in stretches: neighbours are alike."""
    begins = generator.integers(count, size=(RESAMPLES, -(-count // stretch)))
    found = (begins[:, :, None] + np.arange(stretch)) % count
    return found.reshape(RESAMPLES, -1)[:, :count]

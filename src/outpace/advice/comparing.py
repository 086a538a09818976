"""Candidates at one batch: what each of their lengths and trees is expected to gain, and the best ones in trials."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from outpace.advice.candidates import Candidate, Shape
from outpace.advice.engine_commands import Offer
from outpace.advice.measuring import LEAST_PROMPTS, TRIALS, Measurements
from outpace.advice.prediction import Played, Prediction, of_chains, of_records, predict
from outpace.advice.recommendation import Row
from outpace.advice.trial import Trial
from outpace.core.progress import stage
from outpace.engine.method import Method
from outpace.engine.replay import replayable

_TRIED = 3
"""Draft tokens of the chain by which a draft model's levels are timed."""
_CLOSE = 1.01
"""A shape must be expected to be so much better than the method's own choice in every round."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A shape at one batch. ``how`` acceptance was found: replayed, decoded or teacher-forced. ``draft_steps``: what
    drafting takes in a round, in autoregressive ones, where it was not run with the rounds."""

    shape: Shape
    method: Method
    played: Played
    how: str
    guess: Prediction
    draft_steps: float | None = None


@dataclass(frozen=True, slots=True)
class _Tried:
    """A candidate at one batch, all its shapes and the ``best`` of them with its trial, where there was time for it."""

    candidate: Candidate
    found: list[_Found]
    best: _Found
    trial: Trial | None


class Comparison:
    """Of candidates for ``engine`` at one ``batch``, by what was measured of the target in ``work``."""

    def __init__(self, work: Measurements, engine: str, batch: int) -> None:
        self._work, self._engine, self._batch = work, engine, batch
        self._tried: list[_Tried] = []

    def measure(self, one: Candidate, methods: Seq[Method], kept: float) -> None:
        """Play all shapes of a candidate, and try the best, unless no more than ``kept`` seconds are left. ``methods``:
        with these shapes."""
        work, batch = self._work, self._batch
        with stage(f"{one.method}, batch {batch}", brief=True):
            if work.timer.left < kept:
                work.notes.append(f"{one.method} was not measured at batch {batch}: the time was over.")
                return
            found = self._forced(one, methods) if one.teacher_forced else self._played(one, methods)
            if not found:
                work.notes.append(
                    f"{one.method} was not measured at batch {batch}: it would take too long, "
                    "requests join in nearly every round, or answers end in their first one."
                )
                return
            best = max(found, key=lambda each: each.guess.speedup)
            own = next((each for each in found if not each.shape.settings), None)
            if own is not None and best.guess.speedup < _CLOSE * own.guess.speedup:
                best = own
            self._tried.append(_Tried(one, found, best, work.trial(best.method, batch)))

    def outcome(self) -> tuple[list[Row], list[Offer]]:
        """A row of each candidate's best shape, and what all shapes are expected to gain. Once all have been measured:
        what the machine was like in their trials holds for all, and how much trials changed for those without one."""
        predictions: dict[str, Prediction] = {}
        for tried in sorted(self._tried, key=lambda one: one.trial is None):
            predictions[tried.candidate.method] = self._predicted(tried.best, tried.trial)
        rows: list[Row] = []
        offers: list[Offer] = []
        for tried in self._tried:
            one, best, prediction = tried.candidate, tried.best, predictions[tried.candidate.method]
            rows.append(Row(one.method, best.shape, self._batch, prediction, best.how, best.played.tokens_per_round))
            # What the trial has shown of the best shape holds for the others of the method too.
            for each in tried.found:
                share = each.guess.speedup / best.guess.speedup
                speedup, lower = share * prediction.speedup, share * prediction.interval[0]
                offers.append(Offer(one.method, each.shape, speedup, lower, one.head, self._batch))
        return rows, offers

    def _predicted(self, best: _Found, trial: Trial | None) -> Prediction:
        """Rounds of a trial are outpace's own: of another engine's only the draft's time, in autoregressive rounds, is
        taken over."""
        work, batch = self._work, self._batch
        costs = work.costs[batch]
        common: dict[str, Any] = {"noise": work.noise(batch), "slowdowns": work.slowdowns(batch)}
        if self._engine != "outpace" or work.measured_elsewhere(batch):
            steps = best.draft_steps
            if trial is not None and steps != 0.0:  # 0: the engine's rounds hold what drafting takes
                steps = float(trial.draft_steps()[0])
            return predict(best.played, costs, None, draft_steps=steps, untried=work.untried, **common)
        if trial is None:
            return predict(best.played, costs, None, draft_steps=best.draft_steps, untried=work.untried, **common)
        found = predict(best.played, costs, trial, **common)
        guess = predict(best.played, costs, None, draft_steps=best.draft_steps, **common)
        work.tried(guess.speedup, found.speedup)
        return found

    def _played(self, one: Candidate, methods: Seq[Method]) -> list[_Found]:
        work, batch, found = self._work, self._batch, list[_Found]()
        costs = work.costs[batch]
        for shape, method in zip(one.shapes, methods, strict=True):
            if found and work.timer.left < TRIALS * work.timer.whole:
                break
            # Replays of a draft model run all of its forwards.
            free = replayable(method, work.params) and not one.runs_models
            answers = work.answers if free else work.affordable(batch, len(one.shapes))
            if not free and len(answers) < LEAST_PROMPTS:
                continue
            plain = work.plain_rounds(batch)[: len(answers)]
            each = of_records(answers, work.rounds(answers, method, batch), costs, plain)
            if not each.plain.sum():  # the answers end in their first round
                continue
            how = "replayed" if replayable(method, work.params) else "decoded"
            own = work.own[batch]
            steps = None
            if costs is not own:
                # Drafts take as many autoregressive rounds of another engine as of this one, which has made them; but
                # its own rounds, as they were measured, hold what it takes to copy.
                copies = one.head is None and not one.runs_models
                steps = 0.0 if copies else float(each.drafting.sum() / (max(each.asked.sum(), 1e-9) * own.step))
            guess = predict(each, costs, None, draft_steps=steps, slowdowns=work.slowdowns(batch))
            found.append(_Found(shape, method, each, how, guess, steps))
        return found

    def _forced(self, one: Candidate, methods: Seq[Method]) -> list[_Found]:
        """Chains of fixed length need a trial, which shows what drafting takes; there is none where time is short."""
        work, batch = self._work, self._batch
        costs = work.costs[batch]
        middle = next((at for at, shape in enumerate(one.shapes) if shape.chain == _TRIED), 0)
        trial = work.trial(methods[middle], batch)
        found: list[_Found] = []
        for shape, method in zip(one.shapes, methods, strict=True):
            if not shape.chain:  # lengths that are chosen in each round: by running the draft model
                found += self._played(replace(one, shapes=(shape,)), [method])
                continue
            if trial is None:
                continue
            ratios = work.ratios(methods[0])
            answers, plain = work.answers[: len(ratios)], work.plain_rounds(batch)[: len(ratios)]
            each = of_chains(answers, ratios, shape.chain, costs, plain)
            if not each.plain.sum():
                continue
            steps = float(trial.draft_steps()[0]) * shape.chain / max(1, one.shapes[middle].chain)
            guess = predict(each, costs, None, draft_steps=steps, slowdowns=work.slowdowns(batch))
            found.append(_Found(shape, method, each, "teacher-forced", guess, steps))
        return found

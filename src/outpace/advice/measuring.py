"""What an advice measures: the target's answers, rounds of each batch, and rounds of candidates, each in its share of
the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from outpace.advice.prediction import UNTRIED, machine_noise, plain_rounds
from outpace.advice.round_costs import Figures, RoundCosts, measure_rounds
from outpace.advice.trial import Trial, run_trial
from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.engine.known_answers import KnownAnswer, close_answers, known_answers
from outpace.engine.method import Method
from outpace.engine.replay import played
from outpace.engine.request import Request
from outpace.engine.round_records import RoundRecord
from outpace.engine.teacher_forcing import likelihood_ratios
from outpace.targets.base import Target

EngineCosts = Callable[[Seq[int]], Mapping[int, RoundCosts]]
"""Measures rounds of these batches in another engine."""

LEAST_PROMPTS = 6
"""Of which something is said."""
_TOGETHER = 8
"""Prompts that are answered at once."""
_ANSWERS, _ROUNDS, TRIALS, _DECODED = 0.2, 0.25, 0.3, 0.2
"""Shares of the time: for answers, for costs of rounds, for trials, and for methods that have to decode."""
_STEADY = 1.25
"""Factor within which what the same rounds with drafts take at different moments is not worth a note."""
_LONGEST = 12.0
"""Seconds after which a batch's rounds are known well enough."""


@dataclass(slots=True)
class Timer:
    """``minutes`` that are to be spent, in seconds."""

    minutes: float
    began: float = field(default_factory=perf_counter)

    @property
    def whole(self) -> float:
        return 60.0 * self.minutes

    @property
    def spent(self) -> float:
        return perf_counter() - self.began

    @property
    def left(self) -> float:
        return self.whole - self.spent


class Measurements:
    """Of one target, under ``params``. ``plain``: autoregressive decoding. Close them."""

    def __init__(self, target: Target, plain: Method, params: SamplingParams, batches: Seq[int], timer: Timer) -> None:
        self.target, self.plain, self.params, self.batches, self.timer = target, plain, params, batches, timer
        self.answers: list[KnownAnswer] = []
        self.own: dict[int, RoundCosts] = {}
        self.costs: dict[int, RoundCosts] = {}
        """Those of the engine that is advised on, which are the own where it was not measured."""
        self.notes: list[str] = []
        self._known_ratios: dict[int, list[list[float]]] = {}
        self._plain: dict[int, Figures] = {}
        self._turns: dict[int, list[Figures]] = {}
        """Seconds of turns of autoregressive rounds, by batch."""
        self._slowdowns: dict[int, list[float]] = {}
        self._surprises: list[float] = []

    def close(self) -> None:
        """Release the answers' K/V."""
        close_answers(self.target, self.answers)

    def answer(
        self, contexts: Seq[tuple[int, ...]], max_new_tokens: int, ends: frozenset[int], layers: set[int]
    ) -> None:
        """Answer prompts, given as token ids; as many as there is time for."""
        with stage("answering prompts", total=len(contexts), unit="prompts") as at:
            for begin in range(0, len(contexts), _TOGETHER):
                if self.answers and self.timer.spent > _ANSWERS * self.timer.whole:
                    break
                requests = [
                    Request(
                        context,
                        self.plain,
                        replace(self.params, seed=self.params.fixed_seed + 1_000_003 * number),
                        max_new_tokens,
                        ends,
                        repeats=self.params.seed is not None,
                    )
                    for number, context in enumerate(contexts[begin : begin + _TOGETHER], start=begin)
                ]
                self.answers += [one for one in known_answers(self.target, requests, layers) if len(one.tokens) > 1]
                at.move(begin + len(requests))
        if not self.answers:
            raise BadInput("the model ends every answer at once: there is nothing to speed up")
        if len(self.answers) < LEAST_PROMPTS:
            self.notes.append(f"Only {len(self.answers)} prompts were answered, so that the intervals are rough.")

    def ask_engine(self, engine: str, engine_costs: EngineCosts | None) -> None:
        """Time rounds of all batches in ``engine``, where that can be done."""
        if engine_costs is not None:
            began = perf_counter()
            self.costs = dict(engine_costs(self.batches))
            self.timer.began += perf_counter() - began  # a server's starts leave the limit to what is compared
            self.notes.append(f"Rounds were measured in {engine}, what drafting takes beside them in outpace.")
        elif engine != "outpace":
            self.notes.append(
                f"Costs were measured in outpace on this machine and are assumed for {engine}, which was not run."
            )

    def cost(self, batch: int) -> None:
        """Time the rounds of a batch.

        Right before its candidates: those that choose lengths by the clock read how long the last rounds took.
        """
        share = _ROUNDS * self.timer.whole / len(self.batches)
        with stage(f"measuring rounds, batch {batch}", brief=True):
            costs = measure_rounds(self.target, self.answers, batch, min(share, _LONGEST))
        self.own[batch] = costs
        self._turns[batch] = [costs.plain_turns()]
        self._slowdowns[batch] = [float(np.mean(costs.slowdowns()))]
        self.costs.setdefault(batch, self.own[batch])

    def rounds(self, answers: Seq[KnownAnswer], method: Method, batch: int) -> list[RoundRecord]:
        """Its rounds on known answers; again where costs were measured meanwhile, which counts as drafting."""
        measurements, verifying = self.target.costs.measurements, self.own[batch].of_rows
        found = played(self.target, answers, method, batch, verifying)
        if self.target.costs.measurements != measurements:
            found = played(self.target, answers, method, batch, verifying)
        return found

    def plain_rounds(self, batch: int) -> Figures:
        """Autoregressive rounds of each answer after its first one, by weight."""
        if batch not in self._plain:
            records = played(self.target, self.answers, self.plain, batch)
            self._plain[batch] = plain_rounds(self.answers, records, self.costs[batch])
        return self._plain[batch]

    def noise(self, batch: int) -> float:
        """Of the machine, as this run has seen it."""
        return machine_noise(self._turns[batch])

    def slowdowns(self, batch: int) -> list[float]:
        """How many times as long as by the costs rounds with drafts took beside autoregressive ones: when these were
        measured, and in each trial so far. Each counts once: a machine stays as it is for seconds to minutes. Without
        trials, and for another engine that was measured: in each block."""
        if self.measured_elsewhere(batch) or len(self._slowdowns[batch]) == 1:
            return [float(one) for one in self.costs[batch].slowdowns()]
        return self._slowdowns[batch]

    def measured_elsewhere(self, batch: int) -> bool:
        """Whether the costs are those of another engine."""
        return self.costs[batch] is not self.own.get(batch)

    def usual_costs(self) -> dict[int, RoundCosts]:
        """Costs by batch, at the mean of all moments."""
        return {batch: one.slowed(float(np.mean(self.slowdowns(batch)))) for batch, one in self.costs.items()}

    def note_unsteady(self, batch: int) -> None:
        """Say so where the machine was not the same at all moments."""
        least, most = min(self._slowdowns[batch]), max(self._slowdowns[batch])
        if most > _STEADY * least and not self.measured_elsewhere(batch):
            self.notes.append(
                f"At batch {batch} rounds with drafts took up to {most / least:.1f} times as long at some moments as "
                "at others, and speed-ups change with that. Perhaps other programs, or other guests of its host, use "
                "this machine."
            )

    def tried(self, guess: float, found: float) -> None:
        """A trial has changed a speed-up that was expected for the same moments of the machine."""
        self._surprises.append(math.log(found / guess))

    @property
    def untried(self) -> float:
        """By how much trials change expected speed-ups: the root mean square of logarithms."""
        if not self._surprises:
            return UNTRIED
        return math.sqrt(sum(one**2 for one in self._surprises) / len(self._surprises))

    def ratios(self, method: Method) -> list[list[float]]:
        """Likelihood ratios of the draft model of ``method``, of as many answers as there is time for."""
        drafter: Any = method.drafter
        found = self._known_ratios.setdefault(id(drafter.draft), [])
        if not found:
            until = self.timer.spent + _DECODED * self.timer.whole
            for number, one in enumerate(self.answers):
                if number >= LEAST_PROMPTS and self.timer.spent > until:
                    break
                found += likelihood_ratios(drafter.draft, [one])
        return found

    def affordable(self, batch: int, shapes: int) -> list[KnownAnswer]:
        """As many answers as can be decoded again in a shape's share of the time."""
        costs = self.own[batch]
        share = _DECODED * self.timer.whole / (len(self.batches) * min(2 * shapes, 6))
        seconds = [len(one.tokens) * costs.step / costs.batch for one in self.answers]
        kept, spent = 0, 0.0
        while kept < len(seconds) and spent + seconds[kept] <= share:
            spent += seconds[kept]
            kept += 1
        return self.answers[:kept]

    def trial(self, method: Method, batch: int) -> Trial | None:
        """A few real rounds of ``method``, where there is time and requests do not join in nearly all of them."""
        if self.timer.left < 0.02 * self.timer.whole:
            return None
        share = min(TRIALS * self.timer.whole / (6 * len(self.batches)), _LONGEST / 3)
        found = run_trial(self.target, self.answers, method, self.own[batch], share)
        if found is not None:
            self._turns[batch].append(found.plain_turns())
            self._slowdowns[batch].append(float(np.mean(found.slowdowns())))
        return found

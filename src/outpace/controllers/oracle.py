"""``oracle``: the best draft lengths in hindsight; a ceiling for other controllers of chains.

A bench answers each prompt twice: first with the longest drafts, not timed, which shows how many draft tokens are
accepted at each place; then, timed, with those lengths that take the least time for the whole answer, by what rounds
and drafts cost. No token of a chain is then rejected. Of a tree only the depth is cut: its other branches are rejected
as ever. At temperature 0 alone: a sampled draft that was cut by what became of it would change the output distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import cached_property
from operator import add
from typing import Any

from pydantic import BaseModel, Field

from outpace.controllers.base import Budget
from outpace.controllers.cost_model import context_of
from outpace.controllers.named import NamedController, Setup
from outpace.controllers.policy import DraftPolicy
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.core.validation import StrictModel

Lengths = dict[int, int]
"""How many draft tokens were accepted in the round that began after so many tokens of the answer."""


class OracleSettings(StrictModel):
    """Settings of ``oracle``."""

    max_draft_tokens: int = Field(16, ge=1, le=128, description="maximum draft length")


class _Recording(DraftPolicy):
    """Drafts as far as allowed and notes what is accepted."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths, self._at = lengths, 0

    def learn(self, tree: TokenTree, committed: Seq[int]) -> None:
        self._lengths[self._at] = len(tree.follow(committed))
        self._at += len(committed)


def best_lengths(accepted: Lengths, steps: Seq[float]) -> Lengths:
    """The length of each round's draft with which an answer takes the least time, for every place that a round may
    begin at.

    ``accepted``: of the longest drafts. Between their rounds' places the rest of such a draft would be accepted.
    ``steps[k]``: of a round with k draft tokens.
    """
    able = {place + more: length - more for place, length in accepted.items() for more in range(length + 1)}
    end = max((place + length + 1 for place, length in accepted.items()), default=0)
    left, best = [0.0] * (end + 1), Lengths()
    for place in reversed(range(end)):
        most = min(able.get(place, 0), len(steps) - 1)
        times = [steps[length] + left[min(end, place + length + 1)] for length in range(most + 1)]
        best[place] = times.index(min(times))
        left[place] = times[best[place]]
    return best


class _Hindsight(DraftPolicy):
    """Drafts what was accepted before, as far as it is worth its time. ``steps()``: as for :func:`best_lengths`, asked
    once the request decodes."""

    def __init__(self, setup: Setup, accepted: Lengths, steps: Callable[[], Seq[float]]) -> None:
        self._setup, self._accepted, self._steps, self._at = setup, accepted, steps, 0

    @cached_property
    def _lengths(self) -> Lengths:
        return best_lengths(self._accepted, self._steps())

    def budget(self, budget: Budget) -> Budget:
        known = self._lengths.get(self._at)
        return budget if known is None else self._setup.of_length(budget, min(known, budget.depth))

    def learn(self, tree: TokenTree, committed: Seq[int]) -> None:
        self._at += len(committed)


class Oracle(NamedController):
    """Drafts the lengths that take the least time, known beforehand."""

    name = "oracle"
    aliases = ("hindsight",)
    paper = "outpace's own"
    summary = "The best length of each draft, known beforehand: the ceiling of other controllers of chains."
    fits = "every method, in 'outpace bench' at temperature 0; of trees only the depth is cut, so they are no ceiling"
    Settings = OracleSettings
    bench_only = True

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        super().__init__(setup, settings)
        assert isinstance(settings, OracleSettings)
        self._most = settings.max_draft_tokens
        self._recorded: list[Lengths] = []
        self._recording = False
        self._round = 1, 0
        """The last one's batch and context; of an answer that is rehearsed, the largest."""

    def check_params(self, params: SamplingParams) -> None:
        if not params.greedy:
            raise BadInput(
                f"controller 'oracle' is for temperature 0, but the temperature is {params.temperature:g}: cutting "
                "sampled drafts in hindsight would change the output distribution"
            )

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        shape = self.setup.shape(metrics, batch, repeatable)
        now = batch, context_of(metrics)
        self._round = max(self._round, now) if self._recording else now
        return self.setup.of_length(shape, min(shape.depth, self._most))

    def _steps(self) -> list[float]:
        """Of rounds with drafts of 0, 1, 2, ... tokens, as those of now: all requests of a batch draft alike."""
        predictor, (batch, context) = self.setup.predictor, self._round
        drafting = predictor.drafting.levels([1] * self._most, batch, context)
        rounds = (predictor.verification(count, batch, context) for count in range(1, self._most + 1))
        return [1.0, *map(add, rounds, drafting)]

    def rehearse(self, answer: Callable[[], object]) -> None:
        """Run ``answer``, whose requests are then answered again in the same order, with what they have shown."""
        self._recorded, self._recording, self._round = [], True, (1, 0)
        try:
            answer()
        finally:
            self._recording = False
        self._steps()  # costs are measured now, not while the answers are timed

    def policy(self, memory: Any, *, sampled: bool) -> DraftPolicy:
        if self._recording:
            self._recorded.append({})
            return _Recording(self._recorded[-1])
        return _Hindsight(self.setup, self._recorded.pop(0) if self._recorded else {}, self._steps)

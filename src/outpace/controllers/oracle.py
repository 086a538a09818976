"""``oracle``: exactly the draft tokens that are accepted, in hindsight; a ceiling for others where drafts are cheap.

A bench answers each prompt twice: first with the longest drafts, not timed, which shows how many draft tokens are
accepted at each place; then, timed, drafts are exactly that long. So no token of a chain is rejected and none that
would have been accepted is missing; a tree is as deep as its accepted path, and its other branches are rejected as
ever. What drafting takes is not weighed: a drafter whose levels take longer than their tokens save is faster without
drafts. At temperature 0 alone: a sampled draft that was cut by what became of it would change the output distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

from pydantic import BaseModel, Field

from outpace.controllers.base import Budget
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


class _Hindsight(DraftPolicy):
    """Drafts what was accepted before."""

    def __init__(self, setup: Setup, lengths: Lengths) -> None:
        self._setup, self._lengths, self._at = setup, lengths, 0

    def budget(self, budget: Budget) -> Budget:
        known = self._lengths.get(self._at)
        return budget if known is None else self._setup.of_length(budget, min(known, budget.depth))

    def learn(self, tree: TokenTree, committed: Seq[int]) -> None:
        self._at += len(committed)


class Oracle(NamedController):
    """Drafts as deep as what is accepted of them."""

    name = "oracle"
    aliases = ("hindsight",)
    paper = "outpace's own"
    summary = "Drafts as long as what is accepted, known beforehand: a ceiling where drafts take little time."
    fits = "every method, in 'outpace bench' at temperature 0; of trees only the depth is cut, so they are no ceiling"
    Settings = OracleSettings
    bench_only = True

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        super().__init__(setup, settings)
        assert isinstance(settings, OracleSettings)
        self._most = settings.max_draft_tokens
        self._recorded: list[Lengths] = []
        self._recording = False

    def check_params(self, params: SamplingParams) -> None:
        if not params.greedy:
            raise BadInput(
                f"controller 'oracle' is for temperature 0, but the temperature is {params.temperature:g}: cutting "
                "sampled drafts in hindsight would change the output distribution"
            )

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        shape = self.setup.shape(metrics, batch, repeatable)
        return self.setup.of_length(shape, min(shape.depth, self._most))

    def rehearse(self, answer: Callable[[], object]) -> None:
        """Run ``answer``, whose requests are then answered again in the same order, with what they have shown."""
        self._recorded, self._recording = [], True
        try:
            answer()
        finally:
            self._recording = False

    def policy(self, memory: Any, *, sampled: bool) -> DraftPolicy:
        if self._recording:
            self._recorded.append({})
            return _Recording(self._recorded[-1])
        return _Hindsight(self.setup, self._recorded.pop(0) if self._recorded else {})

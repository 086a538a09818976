"""``gamma-star``: the draft length of most tokens per time for one acceptance rate (Leviathan et al. 2023, arXiv
2211.17192, section 3.5).

A round with gamma draft tokens commits (1 - alpha^(gamma + 1)) / (1 - alpha) tokens. In the paper it takes 1 + c gamma
steps, c being a draft forward in autoregressive steps; here the target's forward over 1 + gamma rows has its measured
cost, too. Alpha is the request's acceptance so far, unless it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pydantic import BaseModel, Field

from outpace.controllers.base import Budget
from outpace.controllers.cost_model import context_of
from outpace.controllers.draft_length import acceptance_rate, chosen_length
from outpace.controllers.named import NamedController, Setup
from outpace.controllers.predictor import GivenDraft, LevelSteps, Predictor
from outpace.core.metrics import RequestMetrics
from outpace.core.validation import StrictModel


class GammaStarSettings(StrictModel):
    """Settings of ``gamma-star``."""

    alpha: float | None = Field(
        None, ge=0.0, le=1.0, description="acceptance rate of a draft token; by default that of the request so far"
    )
    c: float | None = Field(
        None, ge=0.0, description="time of one draft token in autoregressive steps; by default measured"
    )
    max_draft_tokens: int = Field(16, ge=1, le=128, description="maximum draft length")


class GammaStar(NamedController):
    """Leviathan's optimal length, chosen again before each draft."""

    name = "gamma-star"
    aliases = ("leviathan-gamma", "optimal-gamma")
    paper = "Leviathan et al. 2023, arXiv 2211.17192"
    summary = "The draft length with the most expected tokens per time, from one acceptance rate and the costs."
    Settings = GammaStarSettings
    adapts = True

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        super().__init__(setup, settings)
        assert isinstance(settings, GammaStarSettings)
        self._settings = settings
        self._known = LevelSteps(self._steps, lambda: setup.target.version)

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        shape = self.setup.shape(metrics, batch, repeatable)
        return self.setup.of_length(shape, self.length(metrics, batch, shape.depth))

    def length(self, metrics: RequestMetrics, batch: int, most: int) -> int:
        """The best length of at most ``most``; 0 where no draft is expected to gain."""
        rate = acceptance_rate(metrics) if self._settings.alpha is None else self._settings.alpha
        most = min(most, self._settings.max_draft_tokens)
        context = context_of(metrics)
        return chosen_length(rate, lambda: islice(self._known.of(batch, context), most), metrics, batch)

    def _steps(self, batch: int, context: int) -> Iterator[float]:
        c = self._settings.c
        predictor = self.setup.predictor if c is None else Predictor(self.setup.target, GivenDraft(c))
        return predictor.steps([1] * (self._settings.max_draft_tokens + 1), batch=batch, context=context)

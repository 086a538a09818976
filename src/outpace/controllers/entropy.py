"""``entropy``: stop where the drafter's distribution is too broad (AdaEDL, Agrawal, Jeon, Lee 2024, arXiv 2410.18351).

1 - sqrt(factor * H) is taken as a lower bound of the probability that a token drawn from a row of entropy H is
accepted. A draft ends before the first row whose bound is below ``threshold``. The row is known before anything is
drawn from it, so this holds for sampled drafts, too. The paper adapts the threshold to a wanted acceptance rate; here
it is fixed.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from outpace.controllers.base import Budget
from outpace.controllers.named import Setup, StoppingController
from outpace.controllers.policy import DraftPolicy, DraftRow
from outpace.core.metrics import RequestMetrics
from outpace.core.validation import StrictModel


class EntropySettings(StrictModel):
    """Settings of ``entropy``."""

    threshold: float = Field(0.3, ge=0.0, le=1.0, description="least bound of the acceptance probability to draft on")
    factor: float = Field(0.2, gt=0.0, description="weight of the entropy (in nats) in the bound")
    max_draft_tokens: int = Field(16, ge=1, le=128, description="maximum draft length")


class _EntropyPolicy(DraftPolicy):
    def __init__(self, settings: EntropySettings) -> None:
        # 1 - sqrt(factor * H) >= threshold, solved for H.
        self._most = (1.0 - settings.threshold) ** 2 / settings.factor

    def draws(self, node: int, above: int | None, depth: int, row: DraftRow, width: int = 1) -> bool:
        return row.entropy <= self._most


class Entropy(StoppingController):
    """Stops a draft by the drafter's entropy, before the draw."""

    name = "entropy"
    aliases = ("adaedl", "entropy-stop")
    paper = "Agrawal, Jeon, Lee 2024, arXiv 2410.18351 (AdaEDL)"
    summary = "Stops before a draw from a distribution whose entropy makes its acceptance unlikely."
    Settings = EntropySettings

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        super().__init__(setup, settings)
        assert isinstance(settings, EntropySettings)
        self._settings = settings

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        return self.longest(metrics, batch, repeatable, self._settings.max_draft_tokens)

    def policy(self, memory: Any, *, sampled: bool) -> DraftPolicy:
        return _EntropyPolicy(self._settings)

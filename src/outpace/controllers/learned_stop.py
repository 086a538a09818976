"""``learned-stop``: a small classifier says, before each draw, whether a token drawn there would be accepted.

After the decision model of multi-candidate speculative decoding (Lu et al. 2024, arXiv 2409.10644), a small network
that is trained on whether the target accepted, and ends a draft where it expects a rejection. Here it is a logistic
regression on what the drafter knows before the draw: largest probability, its margin over the second, entropy, depth.
It begins with weights that take the largest probability as the acceptance rate, and is trained by every verdict of its
namespace, so there is nothing to train beforehand.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, Field

from outpace.controllers.base import Budget
from outpace.controllers.named import Setup, StoppingController
from outpace.controllers.policy import DraftRow, JudgedRows
from outpace.core.metrics import RequestMetrics
from outpace.core.validation import StrictModel

Features = tuple[float, ...]
_CERTAIN = 1e-3
"""Probabilities closer to 0 or 1 are as good as this."""


class LearnedStopSettings(StrictModel):
    """Settings of ``learned-stop``."""

    threshold: float = Field(0.4, ge=0.0, le=1.0, description="least acceptance probability to draft on")
    rate: float = Field(0.1, ge=0.0, le=1.0, description="learning rate of the classifier; 0 keeps its first weights")
    max_draft_tokens: int = Field(16, ge=1, le=128, description="maximum draft length")


class StopClassifier:
    """Logistic regression, trained online. One for each namespace."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.weights = [0.0, 1.0, 0.0, 0.0, 0.0]
        """Of 1, the log-odds of the largest probability, the margin, the entropy and the depth."""

    @staticmethod
    def features(row: DraftRow, depth: int) -> Features:
        """Of a row that a token at ``depth`` (1 = first) may be drawn from."""
        highest = min(1.0 - _CERTAIN, max(_CERTAIN, row.highest))
        return 1.0, math.log(highest / (1.0 - highest)), row.margin, min(4.0, row.entropy) / 4.0, min(depth, 16) / 16.0

    def probability(self, features: Features) -> float:
        """That a token drawn there is accepted."""
        score = math.fsum(weight * one for weight, one in zip(self.weights, features, strict=True))
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, score))))

    def learn(self, features: Features, accepted: bool) -> None:
        """One step of gradient descent on the log-loss."""
        step = self._rate * (float(accepted) - self.probability(features))
        size = math.fsum(one * one for one in features)
        self.weights = [
            weight + step * one / max(1.0, size) for weight, one in zip(self.weights, features, strict=True)
        ]


class _LearnedPolicy(JudgedRows):
    def __init__(self, classifier: StopClassifier, settings: LearnedStopSettings) -> None:
        super().__init__()
        self._classifier, self._settings = classifier, settings

    def draws(self, node: int, above: int | None, depth: int, row: DraftRow, width: int = 1) -> bool:
        features = self._classifier.features(row, depth)
        self.asked[node] = features
        # The first token is always drafted: without it nothing would be learned where drafts were rejected.
        return depth == 1 or self._classifier.probability(features) >= self._settings.threshold

    def judged(self, noted: Any, depth: int, *, accepted: bool) -> None:
        self._classifier.learn(noted, accepted)


class LearnedStop(StoppingController):
    """Stops a draft where a classifier of earlier verdicts expects a rejection."""

    name = "learned-stop"
    aliases = ("imcsd", "decision-model")
    paper = "Lu et al. 2024, arXiv 2409.10644"
    summary = "Stops before a draw that a classifier, trained by the verdicts so far, expects to be rejected."
    Settings = LearnedStopSettings

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        super().__init__(setup, settings)
        assert isinstance(settings, LearnedStopSettings)
        self._settings = settings

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        return self.longest(metrics, batch, repeatable, self._settings.max_draft_tokens)

    def memory(self) -> StopClassifier:
        return StopClassifier(self._settings.rate)

    def policy(self, memory: Any, *, sampled: bool) -> JudgedRows:
        return _LearnedPolicy(memory, self._settings)

"""``fallback``: stop where the whole draft has become unlikely, by a threshold that follows what was accepted.

The self-adaptive fallback of LLMCad (Xu et al. 2023, arXiv 2309.04255): the product of the drafter's largest
probabilities along a path says how likely all of it is right, and a draft ends before it would fall below a threshold.
After a draft that was accepted whole the threshold is multiplied by ``factor``; otherwise divided by ``factor`` to the
power of the share that was rejected. The first token is always drafted: without it nothing would be learned. The
paper's trees, and its drafting during verification, are not part of this controller.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from pydantic import BaseModel, Field

from outpace.controllers.base import Budget
from outpace.controllers.named import Setup, StoppingController
from outpace.controllers.policy import DraftPolicy, DraftRow
from outpace.core.metrics import RequestMetrics
from outpace.core.tree import ROOT, TokenTree
from outpace.core.validation import StrictModel

_LEAST, _MOST = 1e-3, 0.95
"""Between these the threshold moves: at the ends a draft is nearly never, or nearly always, stopped."""


class FallbackSettings(StrictModel):
    """Settings of ``fallback``."""

    threshold: float = Field(0.3, gt=0.0, lt=1.0, description="least probability of a whole draft, at first")
    factor: float = Field(0.5, gt=0.0, le=1.0, description="of the threshold, after an accepted draft; 1: fixed")
    max_draft_tokens: int = Field(16, ge=1, le=128, description="maximum draft length")


class _FallbackPolicy(DraftPolicy):
    """One request's threshold, and how likely each path of this round's draft is."""

    def __init__(self, settings: FallbackSettings) -> None:
        self._factor = settings.factor
        self.threshold = settings.threshold
        self._likely: dict[int, float] = {}
        """By node: the product of the rows' largest probabilities from the root to the row that follows it."""

    def budget(self, budget: Budget) -> Budget:
        self._likely = {}
        return budget

    def draws(self, node: int, above: int | None, depth: int, row: DraftRow, width: int = 1) -> bool:
        before = 1.0 if node == ROOT or above is None else self._likely.get(above, 1.0)
        self._likely[node] = before * row.highest
        return depth == 1 or self._likely[node] >= self.threshold

    def learn(self, tree: TokenTree, committed: Seq[int]) -> None:
        if not len(tree):
            return
        rejected = 1.0 - len(tree.follow(committed)) / max(tree.depths)
        moved = self.threshold * self._factor if rejected <= 0.0 else self.threshold / self._factor**rejected
        self.threshold = min(_MOST, max(_LEAST, moved))


class Fallback(StoppingController):
    """Stops a draft where the whole of it has become unlikely."""

    name = "fallback"
    aliases = ("llmcad",)
    paper = "Xu et al. 2023, arXiv 2309.04255 (LLMCad)"
    summary = "Stops before a draft as a whole becomes unlikely, by a threshold that follows what was accepted."
    Settings = FallbackSettings

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        super().__init__(setup, settings)
        assert isinstance(settings, FallbackSettings)
        self._settings = settings

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        return self.longest(metrics, batch, repeatable, self._settings.max_draft_tokens)

    def policy(self, memory: Any, *, sampled: bool) -> DraftPolicy:
        return _FallbackPolicy(self._settings)

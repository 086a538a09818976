"""``acceptance-ema``: drafts a little more than was accepted lately, whatever it costs.

The controller of engines that adapt the number of draft tokens to recent acceptance: an exponential moving average of
the tokens accepted in a round, and ``extra`` beside it. It reads no costs, so that it also drafts where no draft gains.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from pydantic import BaseModel, Field

from outpace.controllers.base import Budget
from outpace.controllers.named import NamedController, Setup
from outpace.controllers.policy import DraftPolicy
from outpace.core.tree import TokenTree
from outpace.core.validation import StrictModel


class AcceptanceEmaSettings(StrictModel):
    """Settings of ``acceptance-ema``."""

    decay: float = Field(0.8, ge=0.0, lt=1.0, description="weight of the average so far; the rest is the round's")
    initial: float = Field(3.0, ge=0.0, description="average before the first round")
    extra: int = Field(1, ge=1, le=16, description="draft tokens beyond the average")
    max_draft_tokens: int = Field(16, ge=1, le=128, description="maximum draft length")


class _Average(DraftPolicy):
    """One request's average."""

    def __init__(self, setup: Setup, settings: AcceptanceEmaSettings) -> None:
        self._setup, self._settings = setup, settings
        self.accepted = settings.initial

    def budget(self, budget: Budget) -> Budget:
        length = round(self.accepted) + self._settings.extra
        return self._setup.of_length(budget, min(length, self._settings.max_draft_tokens))

    def learn(self, tree: TokenTree, committed: Seq[int]) -> None:
        if len(tree):  # a round in which nothing could be drafted says nothing
            decay = self._settings.decay
            self.accepted = decay * self.accepted + (1.0 - decay) * len(tree.follow(committed))


class AcceptanceEma(NamedController):
    """As many draft tokens as were accepted lately, and a few more."""

    name = "acceptance-ema"
    aliases = ("ema",)
    paper = "a heuristic of inference engines"
    summary = "As many draft tokens as a moving average of the accepted ones, and one more. Reads no costs."
    Settings = AcceptanceEmaSettings

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        super().__init__(setup, settings)
        assert isinstance(settings, AcceptanceEmaSettings)
        self._settings = settings

    def policy(self, memory: Any, *, sampled: bool) -> DraftPolicy:
        return _Average(self.setup, self._settings)

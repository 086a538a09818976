"""Relaxed verification of SpecDec (Xia et al. 2023, arXiv 2203.16487), and the criteria of blockwise decoding.

A draft token is accepted when it is among the target's ``beta`` most probable tokens and its log-probability is at
most ``tau`` below the best one's ("gap", SpecDec's equation 6). Blockwise parallel decoding (Stern et al. 2018, arXiv
1811.03115, section 5) accepts the ``beta`` most probable ones whatever their probability ("top-k"), and, for outputs
whose ids are ordered, such as intensities of pixels, the ids at most ``distance`` from the best one's ("distance").
What no criterion accepts is judged exactly: by rejection sampling, and at temperature 0 by the greedy walk, which a
child that holds the best token always continues.

Promise, with A the accepted set: outside A no token is more probable than under p. So the total variation is at most
1 - min over A of p, which for "gap" is at most 1 - exp(-tau) max p. At temperature 0 the excess negative
log-likelihood of a committed token is at most tau ("gap"), or the gap of the least probable token in A. With beta 1,
tau 0 or distance 0 nothing is relaxed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from pydantic import Field

from outpace.acceptance.bounds import TOTAL_VARIATION, Bound, NodeView
from outpace.acceptance.forgiving import Forgiving
from outpace.core.validation import StrictModel


class TopBetaSettings(StrictModel):
    """Settings of ``top-beta``."""

    criterion: Literal["gap", "top-k", "distance"] = Field(
        "gap", description="gap: among the beta best and within tau; top-k: among the beta best; distance: by token id"
    )
    beta: int = Field(3, ge=1, description="how many of the most probable tokens are accepted (gap, top-k)")
    tau: float = Field(
        1.0, ge=0, le=100, allow_inf_nan=False, description="largest gap to the best log-probability, in nats (gap)"
    )
    distance: int = Field(1, ge=0, description="largest difference to the best token's id (distance)")


class TopBeta(Forgiving[TopBetaSettings]):
    """Accepts draft tokens among the target's beta most probable whose log-probability is within tau of the best."""

    name = "top-beta"
    aliases = ("specdec", "spec-verification")
    paper = "Xia et al. 2023, arXiv 2203.16487; Stern et al. 2018, arXiv 1811.03115"
    Settings = TopBetaSettings
    corners = (
        {},
        {"beta": 1},
        {"tau": 0.0},
        {"beta": 2, "tau": 3.0},
        {"criterion": "top-k", "beta": 2},
        {"criterion": "distance", "distance": 1},
        {"criterion": "distance", "distance": 0},
    )

    @property
    def bound(self) -> Bound:
        if self.settings.criterion == "gap":
            return Bound(TOTAL_VARIATION, "1 - exp(-tau) max p", "tau")
        least = "the beta-th largest p" if self.settings.criterion == "top-k" else "min p within distance of the best"
        return Bound(TOTAL_VARIATION, f"1 - {least}", f"log max p - log {least}")

    @property
    def exact(self) -> bool:
        settings = self.settings
        if settings.criterion == "distance":
            return settings.distance == 0
        return settings.beta == 1 or (settings.criterion == "gap" and settings.tau == 0.0)

    def least(self, node: NodeView) -> float:
        settings, probs = self.settings, node.probs
        if settings.criterion == "gap":
            return node.highest * math.exp(-settings.tau)
        if settings.criterion == "top-k":
            return node.nth(settings.beta)
        near = probs[self._near(node)]
        return float(near[near > 0].min())

    def accepted(self, node: NodeView) -> Callable[[int], bool]:
        settings, probs = self.settings, node.probs
        if settings.criterion == "distance":
            near = self._near(node)
            return lambda token: near.start <= token < near.stop
        least = node.nth(settings.beta)
        if settings.criterion == "gap":
            least = max(least, node.highest * math.exp(-settings.tau))
        return lambda token: float(probs[token]) >= least

    def _near(self, node: NodeView) -> slice:
        best = int(node.probs.argmax())
        return slice(max(0, best - self.settings.distance), best + self.settings.distance + 1)

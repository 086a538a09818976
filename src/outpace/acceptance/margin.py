"""Margin-aware verification (MARS: Song et al. 2026, arXiv 2601.15498): the runner-up passes where the target wavers.

Where the target's two best logits z1 >= z2 > 0 are nearly tied, z2 / z1 > theta, a draft token that is either of them
is accepted; everywhere else, and for all other tokens, verification is exact. The ratio is taken of the logits after
bias, penalties and processors, before temperature.

Promise: at a node with z2 / z1 <= theta, or z2 <= 0, none is relaxed. Elsewhere the total variation is at most 1 -
exp(-(1 - theta) z1 / T) max p, and at temperature 0 the excess negative log-likelihood at most (1 - theta) z1. With
theta 1 the rule is recursive rejection, and at temperature 0 the greedy walk.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pydantic import Field

from outpace.acceptance.bounds import TOTAL_VARIATION, Bound, NodeView
from outpace.acceptance.forgiving import Forgiving
from outpace.core.validation import StrictModel


class MarginSettings(StrictModel):
    """Settings of ``margin``."""

    theta: float = Field(
        0.9, ge=0, le=1, description="ratio of the two best logits above which the runner-up is accepted; 1 is lossless"
    )


class Margin(Forgiving[MarginSettings]):
    """Accepts the target's runner-up where its logit is nearly that of the best token; exact everywhere else."""

    name = "margin"
    aliases = ("marsm", "mars")
    paper = "Song et al. 2026, arXiv 2601.15498"
    Settings = MarginSettings
    corners = ({}, {"theta": 1.0}, {"theta": 0.0}, {"theta": 0.5})

    @property
    def bound(self) -> Bound:
        gap, where = "(1 - theta) z1", "where z2 > max(0, theta z1), else 0"
        return Bound(TOTAL_VARIATION, f"1 - exp(-{gap} / T) max p {where}", f"{gap} {where}")

    @property
    def exact(self) -> bool:
        return self.settings.theta == 1.0

    def least(self, node: NodeView) -> float:
        first, second = node.logits.topk(2).values.tolist()
        if not self._wavers(first, second):
            return math.inf
        return node.highest * math.exp(-(1.0 - self.settings.theta) * first / node.temperature)

    def limit(self, node: NodeView) -> float:
        return 0.0 if self.exact else max(0.0, 1.0 - self.least(node))

    def greedy_limit(self, node: NodeView) -> float:
        return 0.0 if self.exact else max(0.0, math.log(node.highest) - math.log(self.least(node)))

    def accepted(self, node: NodeView) -> Callable[[int], bool]:
        best = node.logits.topk(2)
        return set(best.indices.tolist()).__contains__ if self._wavers(*best.values.tolist()) else lambda _: False

    def _wavers(self, first: float, second: float) -> bool:
        return second > 0.0 and second > self.settings.theta * first

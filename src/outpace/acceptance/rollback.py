"""The rollback policy of the Big Little Decoder (BiLD: Kim et al. 2023, arXiv 2302.07863).

A draft token stands while the two models differ little there: while the cross entropy of the draft token, as a hard
label, under the target's distribution, -log p(x), is at most ``distance``. At the first token beyond it the draft is
rolled back, and the target's own token takes its place. The draft token that the target itself would have chosen
stands at any distance; above temperature 0, where the paper does not sample, tokens beyond the distance are judged by
recursive rejection. The fallback policy, which ends a draft where the draft model is unsure, is method ``bild``.

Promise: where max p < exp(-distance), no token is relaxed. Elsewhere the total variation is at most 1 -
exp(-distance), and at temperature 0 the excess negative log-likelihood at most distance + log max p, and 0 where 1 -
max p < exp(-distance). With distance 0 the rule is recursive rejection, and at temperature 0 the greedy walk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from pydantic import Field

from outpace.acceptance.bounds import TOTAL_VARIATION, Bound, NodeView
from outpace.acceptance.forgiving import Forgiving
from outpace.acceptance.lossy import Corners
from outpace.core.validation import StrictModel

MOST_DISTANCE = 100.0
"""Nats."""


class RollbackSettings(StrictModel):
    """Settings of ``rollback``."""

    distance: float = Field(
        2.0,
        ge=0,
        le=MOST_DISTANCE,
        description="cross entropy in nats from which a draft token is rolled back; 0 is lossless",
    )


class Rollback(Forgiving[RollbackSettings]):
    """Accepts a draft token while its cross entropy under the target is small, and is exact everywhere else."""

    name = "rollback"
    aliases: tuple[str, ...] = ("bild",)
    paper = "Kim et al. 2023, arXiv 2302.07863"
    Settings = RollbackSettings
    corners: ClassVar[Corners] = ({}, {"distance": 0.0}, {"distance": 0.7}, {"distance": 5.0})

    @property
    def bound(self) -> Bound:
        limit = "1 - exp(-distance) where max p >= exp(-distance), else 0"
        return Bound(TOTAL_VARIATION, limit, "max(0, distance + log max p) where 1 - max p >= exp(-distance), else 0")

    @property
    def exact(self) -> bool:
        return self.settings.distance == 0.0

    def least(self, node: NodeView) -> float:
        return math.exp(-self.settings.distance)

    def limit(self, node: NodeView) -> float:
        return super().limit(node) if self._relaxes(node) else 0.0

    def greedy_limit(self, node: NodeView) -> float:
        # Another token than the best one has at most what that one leaves; summed, as 1 - max p is lost to rounding.
        others = node.probs.double().clone()
        others[others.argmax()] = 0.0
        another = float(others.sum()) >= self.least(node) * (1.0 - 1e-6)
        return max(0.0, super().greedy_limit(node)) if another else 0.0

    def accepted(self, node: NodeView) -> Callable[[int], bool]:
        least = self.least(node)
        return lambda token: float(node.probs[token]) >= least

    def _relaxes(self, node: NodeView) -> bool:
        # A node at the threshold, up to rounding, may be on either side of it.
        return node.highest >= self.least(node) * (1.0 - 1e-6)

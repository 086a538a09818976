"""Verification by token importance (DSD: Song et al. 2025, arXiv 2511.11733): strict where the target is decided.

DSD verifies important tokens strictly and relaxes the acceptance of the others, controlled by one parameter. Here a
node is important where the target's most probable token has at least the probability ``key``. Elsewhere the rule
verifies against h = (1 - relax) p + relax d, d being what the drafter proposes: its row q, or its deterministic
tokens in proportion to p (tokens with p = 0 left out). The paper's importance is computed from both models by a
formula with more parameters; only its principle is kept, so that the promise can be stated.

Promise: the total variation is at most ``relax`` where max p < ``key``, and 0 elsewhere. With relax 0 or key 0 the
rule is recursive rejection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from outpace.acceptance.bounds import TOTAL_VARIATION, Bound, NodeView
from outpace.acceptance.relaxed_target import Proposed, RelaxedTarget
from outpace.core.validation import StrictModel

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceSettings(StrictModel):
    """Settings of ``importance``."""

    relax: float = Field(0.2, ge=0, le=1, description="share of the drafter's distribution in what is verified against")
    key: float = Field(
        0.5, ge=0, le=1, description="probability of the best token from which on a node is verified strictly"
    )


class Importance(RelaxedTarget[ImportanceSettings]):
    """Verifies strictly where the target is decided, elsewhere against a mixture with the drafter's distribution."""

    name = "importance"
    aliases = ("dsd",)
    paper = "Song et al. 2025, arXiv 2511.11733"
    Settings = ImportanceSettings
    corners = ({}, {"relax": 0.0}, {"key": 0.0}, {"relax": 1.0, "key": 1.0}, {"relax": 0.1, "key": 1.0})

    @property
    def bound(self) -> Bound:
        return Bound(TOTAL_VARIATION, "relax where max p < key, else 0")

    @property
    def exact(self) -> bool:
        return self.settings.relax == 0.0 or self.settings.key == 0.0

    def limit(self, node: NodeView) -> float:
        # A node at the threshold, up to rounding, may be on either side of it.
        return self.settings.relax if node.highest < self.settings.key * (1.0 + 1e-6) else 0.0

    def relaxed(self, p: Tensor, proposed: Proposed) -> Tensor | None:
        import torch

        if float(p.max()) >= self.settings.key:
            return None
        if proposed.q is None:
            drafted = torch.zeros_like(p)
            drafted[list(proposed.tokens)] = p[list(proposed.tokens)]
        else:
            drafted = proposed.q.to(p.dtype) * (p > 0)
        total = float(drafted.sum())
        if total <= 0.0:
            return None
        return (1.0 - self.settings.relax) * p + drafted * (self.settings.relax / total)

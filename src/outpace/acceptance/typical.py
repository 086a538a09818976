"""Typical acceptance of Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3.1): plausible draft tokens are kept.

A draft token x is accepted when p(x) > min(epsilon, delta exp(-H(p))), H being the entropy of the target's
distribution p: the more tokens are plausible, the less probable a draft token may be. Of several accepted paths the
longest is taken (of equally long ones the first). The token after the accepted path is the target's most probable
one, which the paper accepts unconditionally as the first token of the next round (``greedy_first``). No draft
probabilities are needed.

Promise: a committed token has at least the threshold's probability (so has the most probable token, as max p >=
exp(-H)). Therefore the total variation at a node is at most 1 - min(epsilon, delta exp(-H)), for any drafter. It is
reached where a deterministic drafter proposes a token at the threshold. At temperature 0, p is one-hot, and the rule
is the greedy walk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from typing import ClassVar

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.acceptance.bounds import TOTAL_VARIATION, Bound, NodeView, view
from outpace.acceptance.draws import draws_by_parent
from outpace.acceptance.lossy import Corners, LossyRule, exact_token
from outpace.core.chance import Chance
from outpace.core.tree import ROOT, Draw
from outpace.core.validation import StrictModel
from outpace.targets.base import TreeScores


class TypicalSettings(StrictModel):
    """Settings of ``typical``."""

    epsilon: float = Field(0.09, gt=0, le=1, description="largest threshold of a draft token's probability")
    delta: float = Field(0.3, gt=0, le=1, description="factor of exp(-entropy) in the threshold")
    greedy_first: bool = Field(
        True, description="whether the token after the accepted path is the most probable one, instead of a draw"
    )


class Typical(LossyRule[TypicalSettings]):
    """Accepts draft tokens whose target probability exceeds min(epsilon, delta exp(-entropy))."""

    name = "typical"
    aliases: tuple[str, ...] = ("tas", "typical-acceptance")
    paper = "Cai et al. 2024, arXiv 2401.10774"
    Settings = TypicalSettings
    keeps_greedy = True
    by_node = "chains"
    takes_unverified_draws = True
    corners: ClassVar[Corners] = (
        {},
        {"epsilon": 1.0, "delta": 1.0},
        {"epsilon": 0.001, "delta": 1.0},
        {"epsilon": 1.0, "delta": 0.05, "greedy_first": False},
        {"epsilon": 0.3, "delta": 0.3, "greedy_first": False},
    )

    @property
    def bound(self) -> Bound:
        return Bound(TOTAL_VARIATION, "1 - min(epsilon, delta exp(-H(p)))")

    def threshold(self, node: NodeView) -> float:
        """The probability that a draft token must exceed."""
        return min(self.settings.epsilon, self.settings.delta * math.exp(-node.entropy))

    def limit(self, node: NodeView) -> float:
        return 1.0 - self.threshold(node)

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        path = self._longest(scores, draws_by_parent(scores.tree), ROOT)
        last = path[-1] if path else ROOT
        token = int(scores.p(last).argmax()) if self.settings.greedy_first else exact_token(scores, last, chance)
        return Verdict(tuple(path), token)

    def _longest(self, scores: TreeScores, draws_at: Mapping[int, Seq[Draw]], start: int) -> list[int]:
        """The longest path of accepted nodes below ``start``, the first of equally long ones."""
        best: list[int] = []
        open_paths: list[list[int]] = [[]]
        while open_paths:
            path = open_paths.pop()
            if len(path) > len(best):
                best = path
            node = path[-1] if path else start
            if not (draws := draws_at.get(node)):
                continue
            seen = view(scores, node)
            least = self.threshold(seen)
            accepted = [one.node for one in draws if float(seen.probs[one.token]) > least]
            open_paths += [[*path, child] for child in reversed(dict.fromkeys(accepted))]
        return best

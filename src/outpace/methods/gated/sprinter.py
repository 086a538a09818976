"""Sequential approximate verification (SPRINTER: Zhong, Teku and Tandon 2025, arXiv 2502.04557). Lossy.

A draft model writes token after token, and a gate says of each whether the target would accept it. While it would, the
token stands and the target is not asked. At the first token that the gate doubts, one forward of the target judges that
token exactly, and computes the K/V of all that was written since it was last asked. The target is asked as well after
``num_draft_tokens`` tokens, which bounds that forward.

The gate reads the draft model's row and the drafted token (:func:`outpace.gates.features.row_features`). With
``threshold`` 1 no token passes the gate: every draft ends after one token, which is verified exactly, and the output
distribution is the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field

from outpace.acceptance.gated import Gated, vouched
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.names import number_text
from outpace.core.tree_distribution import TreeDistribution
from outpace.core.validation import StrictModel
from outpace.drafting.model_drafter import DraftModel
from outpace.drafting.tree_builder import ChainBuilder
from outpace.methods.gated.given_gate import FILE, GATE_SETTING, classifier
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from torch import Tensor

LONGEST = 16
Passes = Callable[["Tensor", int, int, bool], bool]
"""Of a row's probabilities (V,), the token drawn from it, its depth, and whether the request is greedy: whether the
token stands unverified."""


class GatedChainBuilder(ChainBuilder):
    """A chain that ends with the first token that the gate does not let pass. Its row is asked after the draw: whether
    a further token is drawn may depend on the tokens before it, and no draw is dropped."""

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance, passes: Passes) -> None:
        super().__init__(sequence, budget, chance)
        self._passes = passes
        self._goes_on = True

    def _draw(self, distribution: TreeDistribution, node: int) -> None:
        super()._draw(distribution, node)
        greedy = self.sequence.params.greedy
        probs = distribution.processed([node])[0].softmax(-1) if greedy else distribution.p(node)
        last = len(self._chain) - 1
        self._goes_on = self._passes(probs, self._chain.tokens[last], self._depth, greedy)
        if self._goes_on:
            self._chain.vouched |= {last}

    def _run_last(self) -> bool:
        return self._goes_on and super()._run_last()


class SprinterSettings(StrictModel):
    """Settings of ``sprinter``."""

    gate: str = Field("", description=GATE_SETTING, json_schema_extra=FILE)
    threshold: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="a token stands where the gate gives its acceptance a higher probability; 1 always asks the "
        "target; by default the one that training chose",
    )
    num_draft_tokens: int = Field(
        LONGEST, ge=1, le=128, description="draft tokens after which the target is asked anyway"
    )


@register(
    "sprinter",
    family="gated",
    paper="Zhong, Teku and Tandon 2025, arXiv 2502.04557",
    needs=("draft model", "gate"),
    lossless=False,
    summary="A trained gate lets draft tokens stand; the target is asked at the first that it doubts. Approximate.",
    when_to_use="A draft model that is nearly as good as the target for the task, and much faster. "
    "Measure the quality first (outpace bench --quality).",
    aliases=("approximate-verification",),
    tiny={"gate": "random", "threshold": 1.0, "num_draft_tokens": 2},
)
def build(context: Context, settings: SprinterSettings) -> Parts:
    """The draft model and the gate that the caller named. Raises BadInput where there is none, or of other models."""
    from outpace.gates.features import ROW_FEATURES, row_features

    draft = context.draft()
    gate, threshold = classifier("sprinter", settings.gate, ROW_FEATURES, settings.threshold, context.target, draft)

    def passes(probs: Tensor, token: int, depth: int, greedy: bool) -> bool:
        return gate.probability(row_features(probs, token, depth, greedy=greedy)) > threshold

    rule = Gated(f"sprinter(threshold={number_text(threshold)})", vouched, exact=threshold == 1.0)
    most = settings.num_draft_tokens
    return Parts(DraftModel(draft, partial(GatedChainBuilder, passes=passes)), Fixed(most, 1, most), rule)

"""Pivot-aware speculative decoding (PAD: Ziashahabi et al. 2025, arXiv 2511.00351). Lossy.

A draft model drafts a chain, and the target verifies it. A draft token that exact verification rejects is replaced only
where it is a *pivot*: one that would cost the answer its usefulness, not one that merely differs. A gate that was
trained on counterfactual continuations says which tokens are pivots
(:mod:`outpace.training.gates.kinds.pad`); it reads the target's hidden states before and behind the token.

With ``threshold`` 0 every rejected token counts as a pivot, and the output distribution is the target's.
"""

from __future__ import annotations

from pydantic import Field

from outpace.acceptance.gated import Gated
from outpace.controllers.draft_length import draft_length
from outpace.core.names import number_text
from outpace.core.tree import Draw
from outpace.core.validation import StrictModel
from outpace.drafting.model_drafter import DraftModel
from outpace.methods.gated.given_gate import FILE, GATE_SETTING, classifier
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import TreeScores


class PadSettings(StrictModel):
    """Settings of ``pad``."""

    gate: str = Field("", description=GATE_SETTING, json_schema_extra=FILE)
    threshold: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="a rejected token stands where the gate gives it a lower probability of being a pivot; 0 lets none "
        "stand; by default the one that training chose",
    )
    num_draft_tokens: int | None = Field(
        None, ge=0, le=128, description="draft tokens in a round; by default from measured costs and acceptance"
    )


@register(
    "pad",
    family="gated",
    paper="Ziashahabi et al. 2025, arXiv 2511.00351",
    needs=("draft model", "gate"),
    lossless=False,
    summary="A draft token that the target would reject stands unless a gate takes it for a pivot. Approximate.",
    when_to_use="Tasks with one right answer and many ways to word it, with a gate that was trained on such tasks: on "
    "other text it spoils answers. Measure the score first (outpace bench --quality).",
    aliases=("pivot-aware",),
    tiny={"gate": "random", "threshold": 0.0, "num_draft_tokens": 2},
)
def build(context: Context, settings: PadSettings) -> Parts:
    """The draft model and the gate that the caller named. Raises BadInput where there is none, or of another target."""
    from outpace.gates.features import state_features, state_features_of

    draft, target = context.draft(), context.target
    layer = target.num_layers
    gate, threshold = classifier("pad", settings.gate, state_features_of(target), settings.threshold, target, None)

    def passes(scores: TreeScores, node: int, draw: Draw) -> bool:
        pivot = gate.probability(state_features(scores, node, draw.node, layer))
        return pivot < threshold or threshold == 1.0

    rule = Gated(f"pad(threshold={number_text(threshold)})", passes, exact=threshold == 0.0, layers=(layer,))
    return Parts(DraftModel(draft), draft_length(target.costs, [draft.costs], settings.num_draft_tokens), rule)

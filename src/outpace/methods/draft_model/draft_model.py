"""A smaller language model drafts: speculative decoding as first proposed.

``draft-model`` (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): any model with the
target's vocabulary drafts ``num_draft_tokens`` tokens one after the other; the target scores them in one forward. At
temperature 0 the draft is the draft model's argmax, above it a sample from the draft model's distribution under the
request's own sampling parameters, handed over with the row it was drawn from.

With ``topk`` above 1 the draft is a tree: the ``max_nodes`` most probable paths under the draft model with at most
``topk`` children a node (as SpecInfer, Miao et al. 2024, arXiv 2305.09781, expands by top-k). It is selected by
probability, so every draft token of it is deterministic, at any temperature.
"""

from __future__ import annotations

from pydantic import Field

from outpace.controllers.draft_length import draft_length
from outpace.core.validation import StrictModel
from outpace.drafting.model_drafter import DraftModel, top_k_tree
from outpace.methods.registry import Context, Parts, register


class DraftModelSettings(StrictModel):
    """Settings of ``draft-model``."""

    num_draft_tokens: int | None = Field(
        None, ge=0, le=128, description="draft tokens on a path (gamma); by default from measured costs and acceptance"
    )
    topk: int = Field(1, ge=1, le=64, description="children of a node; 1 samples a chain, more select a tree")
    max_nodes: int = Field(16, ge=1, le=512, description="number of nodes in the whole tree")
    confidence: float = Field(
        0.0, ge=0.0, le=1.0, description="stop before the next draw when the draft model's largest probability is lower"
    )


@register(
    "draft-model",
    family="draft-model",
    paper="Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
    needs=("draft model",),
    summary="A smaller model with the same vocabulary drafts a chain (sampled from its own distribution) or a "
    "top-k tree.",
    when_to_use="A draft model about ten times faster than the target that often agrees with it, also on "
    "open-ended text. Not with a small target, where drafting costs too much.",
    aliases=("assisted", "assisted-generation", "speculative", "speculative-decoding", "leviathan", "sps"),
    tiny={"num_draft_tokens": 2},
)
def build(context: Context, settings: DraftModelSettings) -> Parts:
    """The draft model that the caller named. Raises BadInput where there is none, or of another vocabulary size."""
    draft = context.draft()
    controller = draft_length(
        context.target.costs,
        [draft.costs],
        settings.num_draft_tokens,
        branching=(settings.topk,),
        max_nodes=settings.max_nodes,
        confidence=settings.confidence,
    )
    return Parts(top_k_tree(draft) if settings.topk > 1 else DraftModel(draft), controller)

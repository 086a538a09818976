"""A smaller language model drafts: speculative decoding as first proposed.

``draft-model`` (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): any model with the
target's vocabulary drafts ``num_draft_tokens`` tokens one after the other; the target scores them in one forward. At
temperature 0 the draft is the draft model's argmax, above it a sample from the draft model's distribution under the
request's own sampling parameters, handed over with the row it was drawn from.

Without ``num_draft_tokens`` the length follows acceptance and the measured costs of both models at this batch, and is 0
where no draft gains. That is the ordinary mode of ``spectre`` (Xie et al. 2026, arXiv 2605.08151), in which a small
model drafts and then waits for the large one; its parallel mode, in which services on other devices draft during
verification, is not built.

With ``topk`` above 1 the draft is a tree: the ``max_nodes`` most probable paths under the draft model with at most
``topk`` children a node (as SpecInfer, Miao et al. 2024, arXiv 2305.09781, expands by top-k). It is selected by
probability, so every draft token of it is deterministic, at any temperature. With ``mode`` mixed, requests above
temperature 0 get such tokens with one draw beside them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.draft_length import draft_length
from outpace.core.validation import StrictModel
from outpace.drafting.mixed_drafter import MixedDraftModel
from outpace.drafting.model_drafter import DraftModel, top_k_tree
from outpace.methods.registry import Context, Parts, register


class DraftModelSettings(StrictModel):
    """Settings of ``draft-model``."""

    num_draft_tokens: int | None = Field(
        None, ge=0, le=128, description="draft tokens on a path (gamma); by default from measured costs and acceptance"
    )
    topk: int = Field(1, ge=1, le=64, description="children of a node; 1 samples a chain, more select a tree")
    mode: Literal["mixed"] | None = Field(
        None,
        description="above temperature 0: most probable tokens with one draw beside them (mixed); by default a sampled "
        "chain, or the most probable paths with topk above 1",
    )
    max_nodes: int = Field(16, ge=1, le=512, description="number of nodes in the whole tree")
    confidence: float = Field(
        0.0, ge=0.0, le=1.0, description="stop before the next draw when the draft model's largest probability is lower"
    )


@register(
    "draft-model",
    family="draft-model",
    paper="Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318; Xie et al. 2026, "
    "arXiv 2605.08151 (SPECTRE, ordinary mode)",
    needs=("draft model",),
    summary="A smaller model with the same vocabulary drafts a chain (sampled from its own distribution) or a "
    "top-k tree.",
    when_to_use="A draft model about ten times faster than the target that often agrees with it, also on "
    "open-ended text. Not with a small target, where drafting costs too much.",
    aliases=("assisted", "assisted-generation", "speculative", "speculative-decoding", "leviathan", "sps", "spectre"),
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
    if settings.mode == "mixed":
        # Beside one draw, made first, top-down rejection accepts as much as univer, and needs p only where it arrives.
        return Parts(MixedDraftModel(draft, settings.topk), controller, RecursiveRejection())
    return Parts(top_k_tree(draft) if settings.topk > 1 else DraftModel(draft), controller)

"""The ``distill`` method (DistillSpec, Zhou et al. 2024, arXiv 2310.08461): a draft LM made for this very target."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from outpace.controllers.cost_model import CostModel
from outpace.controllers.draft_length import DraftLength
from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.core.validation import StrictModel
from outpace.drafting.model_drafter import DraftModel
from outpace.drafting.sampled_trees import WithoutReplacement
from outpace.methods.draft_model.tree_settings import Branching
from outpace.methods.registry import Context, Parts, register


class DistillSettings(StrictModel):
    """Settings of ``distill``."""

    draft: Literal["likeliest", "sampled", "sampled-tree"] = Field(
        "likeliest", description="the most probable paths, a sampled chain, or a tree drawn without replacement"
    )
    topk: int = Field(
        4, ge=1, le=64, description="for draft=likeliest: maximum number of children per node; 1: a chain"
    )
    max_nodes: int | None = Field(
        None, ge=0, le=512, description="draft tokens per round; by default from measured costs and acceptance"
    )
    depth: int = Field(
        5,
        ge=0,
        le=64,
        description="draft tokens on a path, if max_nodes is given; for sampled chains by default from measured costs",
    )
    branching: Branching = Field((3, 2, 1, 1), min_length=1, description="sampled-tree: draws after each node")
    confidence: float = Field(
        0.3, ge=0.0, le=1.0, description="sampled: stop before the next draw when the largest probability is lower"
    )


@register(
    "distill",
    family="trained",
    paper="Zhou et al. 2024, arXiv 2310.08461",
    summary="A small draft LM, distilled from this target, drafts its most probable paths or its own samples.",
    when_to_use="Open-ended text with a target that is slow compared with a few small layers. Drafters that read "
    "the target's hidden states have longer accepted lengths for the same cost.",
    aliases=("distillspec", "draft-lm"),
    head="draft-lm",
    tiny={"max_nodes": 3, "depth": 2, "topk": 2},
)
def build(context: Context, settings: DistillSettings) -> Parts:
    """The draft LM that was named or is shipped, beside the target. Raises BadInput where there is none."""
    from outpace.methods.learned.distill.drafter import DistillDrafter
    from outpace.methods.learned.distill.network import DraftLm
    from outpace.methods.learned.distill.target import HeadTarget

    head, target, most = context.head("draft-lm"), context.target, settings.max_nodes
    assert isinstance(head, DraftLm)
    if settings.draft == "likeliest":
        drafter = DistillDrafter(HeadTarget(head, target), target, tree=settings.topk > 1)
        if most is None:
            return Parts(drafter, CostModel(target.costs, width=settings.topk))
        return Parts(drafter, Fixed(settings.depth, settings.topk, most))
    draft = HeadTarget(head, target, widened=True)
    if settings.draft == "sampled":
        if most is None and "depth" not in settings.model_fields_set:
            return Parts(DraftModel(draft), DraftLength(target.costs, [draft.costs], confidence=settings.confidence))
        length = settings.depth if most is None else min(settings.depth, most)
        return Parts(DraftModel(draft), Fixed(length, confidence=settings.confidence))
    builder = partial(WithoutReplacement, branching=settings.branching)
    controller = Fixed(
        len(settings.branching), max(settings.branching), 32 if most is None else most, settings.confidence
    )
    return Parts(DraftModel(draft, builder, Proposal(tree=True, sampled=True, replacement=False)), controller)

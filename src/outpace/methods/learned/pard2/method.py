"""The ``pard2`` method (PARD-2, An et al. 2026, arXiv 2605.08632): all draft tokens from one forward."""

from __future__ import annotations

from pydantic import Field

from outpace.controllers.base import Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.validation import StrictModel
from outpace.methods.registry import Context, Parts, register


class Pard2Settings(StrictModel):
    """Settings of ``pard2``."""

    topk: int = Field(
        8, ge=1, le=64, description="number of most probable tokens per position that are candidates; 1: a chain"
    )
    max_nodes: int | None = Field(
        None, ge=0, le=512, description="draft tokens per round; by default from measured costs and acceptance"
    )
    depth: int = Field(8, ge=0, le=32, description="draft tokens on a path, if max_nodes is given")
    features: bool = Field(True, description="whether rows carry the target's hidden states (target-dependent mode)")
    sampled: bool = Field(False, description="above temperature 0, a sampled chain instead of a tree")


@register(
    "pard2",
    family="trained",
    paper="An et al. 2026, arXiv 2605.08632",
    summary="A small LM predicts all draft tokens in one forward pass from mask tokens after the last token; "
    "a tree of the most probable.",
    when_to_use="Drafters whose forward pass is expensive: a draft always takes one. Chains of a drafter that "
    "reads its own tokens have longer accepted lengths.",
    aliases=("pard",),
    head="pard2",
    tiny={"max_nodes": 3, "depth": 2, "topk": 2},
)
def build(context: Context, settings: Pard2Settings) -> Parts:
    """The head that was named or is shipped, beside the target. Raises BadInput where no head fits it."""
    from outpace.methods.learned.pard2.drafter import Pard2Drafter
    from outpace.methods.learned.pard2.network import Pard2

    head = context.head("pard2")
    assert isinstance(head, Pard2)
    drafter = Pard2Drafter(head, context.target, settings.topk, features=settings.features, sampled=settings.sampled)
    controller: Controller = CostModel(context.target.costs, width=settings.topk)
    if settings.max_nodes is not None:
        controller = Fixed(settings.depth, settings.topk, settings.max_nodes)
    return Parts(drafter, controller)

"""The ``dflash`` method (Chen et al. 2026, arXiv 2602.06036): a block of tokens from one forward."""

from __future__ import annotations

from pydantic import Field

from outpace.controllers.base import Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.validation import StrictModel
from outpace.methods.registry import Context, Parts, register


class DFlashSettings(StrictModel):
    """Settings of ``dflash``."""

    num_draft_tokens: int | None = Field(
        None, ge=0, le=63, description="draft tokens per round; by default from measured costs and acceptance"
    )
    sampled: bool = Field(
        True, description="whether tokens are sampled above temperature 0; otherwise always the most probable"
    )


@register(
    "dflash",
    family="trained",
    paper="Chen et al. 2026, arXiv 2602.06036",
    summary="A few layers over the target's hidden states fill in a block of masked tokens in one forward "
    "pass; a chain.",
    head="dflash",
    when_to_use="Drafters whose forward pass is expensive: a draft always takes one. Each token is predicted "
    "without the draft tokens before it, so long blocks need a well-trained head.",
    tiny={"num_draft_tokens": 2},
)
def build(context: Context, settings: DFlashSettings) -> Parts:
    """A chain from one block. Raises BadInput where no head fits the target."""
    from outpace.methods.learned.dflash.drafter import DFlashDrafter, head_of

    drafter = DFlashDrafter(head_of(context), context.target, sampled=settings.sampled)
    controller: Controller = CostModel(context.target.costs, drafter.most)
    if settings.num_draft_tokens is not None:
        controller = Fixed(settings.num_draft_tokens, max_nodes=settings.num_draft_tokens)
    return Parts(drafter, controller)

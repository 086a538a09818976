"""DDTree (Ringel and Romano 2026, arXiv 2604.12989): a tree from the rows of one DFlash block.

Each row of a block is a distribution of the token at its position, independent of the tokens before it. So any choice
of one candidate a row is a draft, with the product of the candidates' probabilities. The tree holds the likeliest
prefixes of such drafts, found best first (:mod:`outpace.drafting.marginals`, which lists what differs from the paper).
"""

from __future__ import annotations

from pydantic import Field

from outpace.controllers.base import Controller
from outpace.controllers.fixed import Fixed
from outpace.core.validation import StrictModel
from outpace.methods.registry import Context, Parts, register


class DDTreeSettings(StrictModel):
    """Settings of ``ddtree``."""

    max_nodes: int | None = Field(
        None, ge=0, le=512, description="draft tokens per round; by default from measured costs and acceptance"
    )
    topk: int = Field(8, ge=2, le=64, description="number of most probable tokens per position that are candidates")


@register(
    "ddtree",
    family="trained",
    paper="Ringel and Romano 2026, arXiv 2604.12989",
    summary="The most probable prefixes from the rows of one dflash block, as a tree.",
    head="dflash",
    when_to_use="As dflash, when scoring a few more tokens costs the target little.",
    tiny={"max_nodes": 3, "topk": 2},
)
def build(context: Context, settings: DDTreeSettings) -> Parts:
    """A tree from one block. Raises BadInput where no head fits the target."""
    from outpace.controllers.cost_model import CostModel
    from outpace.methods.learned.dflash.drafter import DFlashDrafter, head_of

    drafter = DFlashDrafter(head_of(context), context.target, settings.topk)
    controller: Controller = CostModel(context.target.costs, width=settings.topk)
    if settings.max_nodes is not None:
        controller = Fixed(drafter.most, topk=settings.topk, max_nodes=settings.max_nodes)
    return Parts(drafter, controller)

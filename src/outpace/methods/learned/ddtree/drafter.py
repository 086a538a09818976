"""DDTree (Ringel and Romano 2026, arXiv 2604.12989): a tree from the rows of one DFlash block.

A block says for every position what may stand there, whatever stands before; so any choice of one candidate a row is a
draft, as likely as the product of its candidates' probabilities. The tree holds the likeliest beginnings of such
drafts, found best first (:mod:`outpace.drafting.marginals`, which also says what is ours).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from outpace.controllers.base import Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.methods.learned.dflash.drafter import DFlashDrafter, head_of
from outpace.methods.registry import Context, Parts, register


class DDTreeSettings(BaseModel):
    """Settings of ``ddtree``."""

    model_config = ConfigDict(extra="forbid")

    nodes: int | None = Field(None, ge=0, le=512, description="draft tokens a round; by default what pays")
    k: int = Field(8, ge=2, le=64, description="likeliest tokens of each position that are looked at")


@register(
    "ddtree",
    family="trained",
    paper="Ringel and Romano 2026, arXiv 2604.12989",
    summary="The likeliest prefixes that the rows of one dflash block spell, as a tree.",
    head="dflash",
    when_to_use="Wherever dflash does and the target scores a few more rows at little cost.",
    tiny={"nodes": 3, "k": 2},
)
def build(context: Context, settings: DDTreeSettings) -> Parts:
    """A tree from one block."""
    drafter = DFlashDrafter(head_of(context), context.target, settings.k)
    controller: Controller = CostModel(context.target.costs, width=settings.k)
    if settings.nodes is not None:
        controller = Fixed(drafter.most, width=settings.k, nodes=settings.nodes)
    return Parts(drafter, controller)

"""Drafts of parallel heads: what the target's last known state says of the positions to come, one forward a round.

The newest state is that of the token before the last: the last committed token came out of it and has none yet. So the
first head, which says what stands two positions behind its state, says the first draft token.

``medusa`` (Cai et al. 2024, arXiv 2401.10774) spans a tree over the heads' likeliest tokens. The paper's tree is chosen
once, node by node, by how often the i-th choice of each head was right; ``tree="sparse"`` chooses it by those rates as
the request itself has them. By default it is chosen in every round, by the rates that candidates as sure as these have
had. ``bpd`` (Stern et al. 2018, arXiv 1811.03115) drafts the chain of every head's likeliest token. Judged exactly,
both: the papers' looser criteria are another matter.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from outpace.controllers.base import Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.heads.parallel_drafter import HeadsDrafter
from outpace.methods.learned.medusa.network import Medusa
from outpace.methods.registry import Context, Parts, register


class MedusaSettings(BaseModel):
    """Settings of ``medusa``."""

    model_config = ConfigDict(extra="forbid")

    nodes: int | None = Field(None, ge=0, le=512, description="draft tokens a round; by default what pays")
    k: int = Field(8, ge=1, le=64, description="likeliest tokens of each head that are looked at")
    tree: Literal["dynamic", "sparse"] = Field(
        "dynamic", description="chosen by how sure the heads are, or by the rank of their tokens alone"
    )


@register(
    "medusa",
    family="trained",
    paper="Cai et al. 2024, arXiv 2401.10774",
    summary="Heads on the target's last state each say one of the next tokens; a tree is spanned over their choices.",
    head="medusa",
    when_to_use="Where a draft must cost next to nothing: all heads are one small forward a round. "
    "Later positions are said without knowing the earlier ones, so accepted paths stay short.",
    tiny={"nodes": 3, "k": 2},
)
def build_medusa(context: Context, settings: MedusaSettings) -> Parts:
    """A tree over the heads' likeliest tokens."""
    head = context.head("medusa")
    assert isinstance(head, Medusa)
    drafter = HeadsDrafter(head, context.target, settings.k, by_rank=settings.tree == "sparse")
    controller: Controller = CostModel(context.target.costs, width=settings.k)
    if settings.nodes is not None:
        controller = Fixed(drafter.heads, width=settings.k, nodes=settings.nodes)
    return Parts(drafter, controller)

"""Medusa at decoding (Cai et al. 2024, arXiv 2401.10774): a tree over the likeliest tokens of parallel heads.

The paper's tree is fixed in advance, chosen node by node by how often the i-th choice of each head was right;
``tree="typical"`` chooses it by the rates that training measured on held-out text, ``tree="sparse"`` by those that are
observed in the request itself. By default every round chooses its tree by the acceptance rates of candidates of similar
probability. The acceptance rule is an exact one, not the paper's typical acceptance.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.controllers.base import Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel
from outpace.methods.registry import Context, Parts, register


class MedusaSettings(StrictModel):
    """Settings of ``medusa``."""

    max_nodes: int | None = Field(
        None, ge=0, le=512, description="draft tokens per round; by default from measured costs and acceptance"
    )
    topk: int = Field(8, ge=1, le=64, description="number of most probable tokens per head that are candidates")
    tree: Literal["dynamic", "sparse", "typical"] = Field(
        "dynamic",
        description="tree chosen by the heads' probabilities, only by the ranks of their tokens as they are accepted, "
        "or by the ranks' accuracies that training measured",
    )


@register(
    "medusa",
    family="trained",
    paper="Cai et al. 2024, arXiv 2401.10774",
    summary="Heads on the target's last hidden state each predict one of the next tokens; a tree combines "
    "their choices.",
    head="medusa",
    when_to_use="When drafting must cost almost nothing: all heads take one small forward pass per round. Later "
    "tokens are predicted without the earlier ones, so accepted paths are short.",
    tiny={"max_nodes": 3, "topk": 2},
)
def build(context: Context, settings: MedusaSettings) -> Parts:
    """A tree over the heads' likeliest tokens. Raises BadInput where no head fits the target."""
    from outpace.heads.parallel_drafter import HeadsDrafter
    from outpace.methods.learned.medusa.network import Medusa

    head = context.head("medusa")
    assert isinstance(head, Medusa)
    accuracies = head.config.rank_accuracies if settings.tree == "typical" else ()
    if settings.tree == "typical" and not accuracies:
        raise BadInput("method 'medusa': tree=typical needs a head whose accuracies training measured; train it again")
    by_rank = settings.tree == "sparse"
    drafter = HeadsDrafter(head, context.target, settings.topk, by_rank=by_rank, accuracies=accuracies)
    controller: Controller = CostModel(context.target.costs, width=settings.topk)
    if settings.max_nodes is not None:
        controller = Fixed(drafter.heads, topk=settings.topk, max_nodes=settings.max_nodes)
    return Parts(drafter, controller)

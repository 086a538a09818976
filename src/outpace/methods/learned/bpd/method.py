"""Blockwise parallel decoding (``bpd``, Stern et al. 2018, arXiv 1811.03115): a chain of every head's likeliest token.

The acceptance rule is an exact one; the paper's looser criteria are not used.
"""

from __future__ import annotations

from pydantic import Field

from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.validation import StrictModel
from outpace.methods.registry import Context, Parts, register


class BpdSettings(StrictModel):
    """Settings of ``bpd``."""

    num_draft_tokens: int | None = Field(
        None, ge=0, le=16, description="draft tokens per round; by default from measured costs and acceptance"
    )


@register(
    "bpd",
    family="trained",
    paper="Stern et al. 2018, arXiv 1811.03115",
    summary="One feed-forward layer on the target's last hidden state predicts the next tokens at once, as a chain.",
    head="bpd",
    when_to_use="As medusa, on machines where scoring more than a few tokens is expensive. Elsewhere trees have "
    "longer accepted lengths.",
    tiny={"num_draft_tokens": 2},
)
def build(context: Context, settings: BpdSettings) -> Parts:
    """The chain of the heads' likeliest tokens. Raises BadInput where no head fits the target."""
    from outpace.heads.parallel_drafter import HeadsDrafter
    from outpace.methods.learned.bpd.network import Bpd

    head = context.head("bpd")
    assert isinstance(head, Bpd)
    drafter = HeadsDrafter(head, context.target, 1)
    if settings.num_draft_tokens is None:
        return Parts(drafter, CostModel(context.target.costs))
    return Parts(drafter, Fixed(settings.num_draft_tokens, max_nodes=settings.num_draft_tokens))

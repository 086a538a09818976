"""Blockwise parallel decoding (``bpd``, Stern et al. 2018, arXiv 1811.03115): a chain of every head's likeliest token.

Judged exactly; the looser criteria of the paper are another matter.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.heads.parallel_drafter import HeadsDrafter
from outpace.methods.learned.bpd.network import Bpd
from outpace.methods.registry import Context, Parts, register


class BpdSettings(BaseModel):
    """Settings of ``bpd``."""

    model_config = ConfigDict(extra="forbid")

    length: int | None = Field(None, ge=0, le=16, description="draft tokens a round; by default what pays")


@register(
    "bpd",
    family="trained",
    paper="Stern et al. 2018, arXiv 1811.03115",
    summary="One feed-forward layer on the target's last state says the next tokens at once, a chain.",
    head="bpd",
    when_to_use="As medusa's heads do, on machines where scoring more than a few rows is dear. A tree accepts more "
    "elsewhere.",
    tiny={"length": 2},
)
def build_bpd(context: Context, settings: BpdSettings) -> Parts:
    """The chain of the heads' likeliest tokens."""
    head = context.head("bpd")
    assert isinstance(head, Bpd)
    drafter = HeadsDrafter(head, context.target, 1)
    if settings.length is None:
        return Parts(drafter, CostModel(context.target.costs))
    return Parts(drafter, Fixed(settings.length, nodes=settings.length))

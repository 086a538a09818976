"""Recursive speculative decoding (``rsd``, Jeon et al. 2024, arXiv 2402.14160): trees sampled without replacement.

Siblings are drawn by Gumbel-top-k with a constant branching per level, or as a stochastic beam. Every draw has its q.
At temperature 0 the same tree is built of the likeliest tokens, and the beam is a beam search.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from outpace.core.proposal import Proposal
from outpace.drafting.sampled_trees import StochasticBeam, WithoutReplacement
from outpace.methods.draft_model.tree_settings import TreeSettings, sampled_tree_parts
from outpace.methods.registry import Context, Parts, register


class RsdSettings(TreeSettings):
    """Settings of ``rsd``."""

    beam: int = Field(
        0, ge=0, le=64, description="above 0: a stochastic beam of this width, as deep as branching is long"
    )

    @model_validator(mode="after")
    def _room_for_the_beam(self) -> Self:
        if self.beam > self.max_nodes:
            raise ValueError(f"max_nodes ({self.max_nodes}) leaves no room for the beam, {self.beam} draws a level")
        return self


@register(
    "rsd",
    family="draft-model",
    paper="Jeon et al. 2024, arXiv 2402.14160",
    needs=("draft model",),
    summary="A draft model's tree of siblings sampled without replacement (Gumbel-top-k or stochastic beam).",
    when_to_use="A fast draft model and a target whose forward pass costs little more for additional rows.",
    tiny={"branching": (2, 1)},
)
def build(context: Context, settings: RsdSettings) -> Parts:
    """Draws without replacement."""
    proposal = Proposal(tree=True, sampled=True, replacement=False)
    if settings.beam:
        return sampled_tree_parts(context, StochasticBeam, proposal, (settings.beam,), settings)
    return sampled_tree_parts(context, WithoutReplacement, proposal, settings.branching, settings)

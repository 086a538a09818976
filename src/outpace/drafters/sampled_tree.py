"""Trees sampled from a draft model, each draw with its true q.

``rsd`` (recursive speculative decoding, Jeon et al. 2024, arXiv 2402.14160): siblings are drawn without replacement,
by Gumbel-top-k with a constant branching per level, or as a stochastic beam. ``sampled-tree``: siblings drawn with
replacement, as SpecInfer's multi-step speculative sampling has them (Miao et al. 2024, arXiv 2305.09781), or the
likeliest tokens and one sampled from the rest (Hu et al. 2025, arXiv 2502.18779).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outpace.controllers.fixed import Fixed
from outpace.drafters.base import Proposal
from outpace.drafters.draft_model import DraftModel, draft_of
from outpace.drafters.sampled_growth import (
    GreedyPlusOne,
    SampledGrowth,
    StochasticBeam,
    WithoutReplacement,
    WithReplacement,
)
from outpace.method import Context, Parts, register

Branching = tuple[Annotated[int, Field(ge=1, le=64)], ...]


class TreeSettings(BaseModel):
    """What both methods have."""

    model_config = ConfigDict(extra="forbid")

    branching: Branching = Field((3, 2, 1, 1), min_length=1, description="draws after each node, level by level")
    nodes: int = Field(32, ge=1, le=512, description="draws in the whole tree; a node is not expanded beyond it")

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.branching[0] > self.nodes:
            raise ValueError(f"nodes ({self.nodes}) leave no room for the first level ({self.branching[0]} draws)")
        return self


class RsdSettings(TreeSettings):
    """Settings of ``rsd``."""

    beam: int = Field(
        0, ge=0, le=64, description="above 0: a stochastic beam of this width, as deep as branching is long"
    )

    @model_validator(mode="after")
    def _room_for_the_beam(self) -> Self:
        if self.beam > self.nodes:
            raise ValueError(f"nodes ({self.nodes}) leave no room for the beam ({self.beam} draws a level)")
        return self


class SampledTreeSettings(TreeSettings):
    """Settings of ``sampled-tree``."""

    draws: Literal["replacement", "greedy"] = Field(
        "replacement", description="siblings drawn independently, or the likeliest tokens and one sampled"
    )


def _parts(
    context: Context, growth: type[SampledGrowth], proposal: Proposal, branching: Branching, settings: TreeSettings
) -> Parts:
    drafter = DraftModel(draft_of(context), partial(growth, branching=branching), proposal)
    return Parts(drafter, Fixed(len(settings.branching), max(settings.branching), settings.nodes))


@register(
    "rsd",
    family="draft-model",
    paper="Jeon et al. 2024, arXiv 2402.14160",
    summary="A draft model's tree of siblings sampled without replacement (Gumbel-top-k or stochastic beam).",
    pays="Above temperature 0 with a quick draft model and rows to spare. At 0 it drafts a chain like any other.",
    tiny={"branching": (2, 1)},
)
def build_rsd(context: Context, settings: RsdSettings) -> Parts:
    """Draws without replacement."""
    proposal = Proposal(tree=True, sampled=True, replacement=False)
    if settings.beam:
        return _parts(context, StochasticBeam, proposal, (settings.beam,), settings)
    return _parts(context, WithoutReplacement, proposal, settings.branching, settings)


@register(
    "sampled-tree",
    family="draft-model",
    paper="Miao et al. 2024, arXiv 2305.09781; Hu et al. 2025, arXiv 2502.18779",
    summary="A draft model's tree of siblings sampled with replacement, or the likeliest and one sampled.",
    pays="Above temperature 0 with a quick draft model; where it is sure of itself, draws repeat and rsd wastes less.",
    tiny={"branching": (2, 1)},
)
def build_sampled_tree(context: Context, settings: SampledTreeSettings) -> Parts:
    """Draws with replacement, or greedy plus one."""
    if settings.draws == "greedy":
        proposal = Proposal(tree=True, sampled=True, single=True)
        return _parts(context, GreedyPlusOne, proposal, settings.branching, settings)
    return _parts(context, WithReplacement, Proposal(tree=True, sampled=True), settings.branching, settings)

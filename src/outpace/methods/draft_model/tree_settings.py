"""Settings of the methods that sample trees from a draft model, and their parts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Self

from pydantic import Field, model_validator

from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.core.validation import StrictModel
from outpace.drafting.model_drafter import DraftModel
from outpace.drafting.sampled_trees import SampledTreeBuilder
from outpace.methods.registry import Context, Parts

Branching = tuple[Annotated[int, Field(ge=1, le=64)], ...]
"""Children of a node, level by level."""


class TreeSettings(StrictModel):
    """What methods that sample trees from a draft model share."""

    branching: Branching = Field((3, 2, 1, 1), min_length=1, description="draws after each node, level by level")
    max_nodes: int = Field(32, ge=1, le=512, description="draws in the whole tree; a node is not expanded beyond it")

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.branching[0] > self.max_nodes:
            raise ValueError(
                f"max_nodes ({self.max_nodes}) leaves no room for the first level, {self.branching[0]} draws"
            )
        return self


def sampled_tree_parts(
    context: Context,
    builder: type[SampledTreeBuilder],
    proposal: Proposal,
    branching: Branching,
    settings: TreeSettings,
) -> Parts:
    """Drafter and controller of a method whose trees ``builder`` draws from the draft model."""
    drafter = DraftModel(context.draft(), partial(builder, branching=branching), proposal)
    return Parts(drafter, Fixed(len(settings.branching), max(settings.branching), settings.max_nodes))

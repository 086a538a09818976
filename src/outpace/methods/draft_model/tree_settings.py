"""Settings of the methods that sample trees from a draft model, and their parts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Self

from pydantic import Field, model_validator

from outpace.controllers.draft_length import draft_length
from outpace.core.proposal import Proposal
from outpace.core.validation import StrictModel
from outpace.drafting.model_drafter import DraftModel
from outpace.drafting.sampled_trees import SampledTreeBuilder
from outpace.methods.registry import Context, Parts

Branching = tuple[Annotated[int, Field(ge=1, le=64)], ...]
"""Children of a node, level by level."""


def check_first_level(branching: Branching, max_nodes: int) -> None:
    """Raise ValueError where the first level alone has more draws than the tree may hold."""
    if branching[0] > max_nodes:
        raise ValueError(f"max_nodes ({max_nodes}) leaves no room for the first level, {branching[0]} draws")


class TreeSettings(StrictModel):
    """What methods that sample trees from a draft model share."""

    branching: Branching = Field(
        (3, 2, 1, 1),
        min_length=1,
        description="draws after each node, level by level; if not given, the number of levels follows measured "
        "costs and acceptance",
    )
    max_nodes: int = Field(32, ge=1, le=512, description="draws in the whole tree; a node is not expanded beyond it")

    @model_validator(mode="after")
    def _room(self) -> Self:
        check_first_level(self.branching, self.max_nodes)
        return self


def sampled_tree_parts(
    context: Context,
    builder: type[SampledTreeBuilder],
    proposal: Proposal,
    branching: Branching,
    settings: TreeSettings,
) -> Parts:
    """Drafter and controller of a method whose trees ``builder`` draws from the draft model."""
    draft = context.draft()
    drafter = DraftModel(draft, partial(builder, branching=branching), proposal)
    length = len(settings.branching) if "branching" in settings.model_fields_set else None
    costs, drafts = context.target.costs, [draft.costs]
    return Parts(drafter, draft_length(costs, drafts, length, branching=branching, max_nodes=settings.max_nodes))

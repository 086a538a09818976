"""SpecInfer: several draft models, one token tree (Miao et al. 2024, arXiv 2305.09781).

Every draft model drafts a tree of its own; the trees are merged, equal nodes once, and the target scores them in one
forward (section 3, merge-based construction). Two ways to expand a node (section 3, expansion-based construction, and
algorithm 2): ``sampled`` draws its children independently from that model's distribution, each with its true q, and
multi-step speculative sampling tries them one after the other; ``top-k`` takes the likeliest, as deterministic draft
tokens, as both do at temperature 0. A model of another vocabulary drafts the tokens that it shares with the target.

The paper tunes its small models so that each is right where the others fail ("boost-tuning"); here they are used as
they are.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Literal, Self

from pydantic import Field, model_validator

from outpace.controllers.combined import CombinedController
from outpace.controllers.draft_length import draft_length
from outpace.core.proposal import Proposal
from outpace.core.validation import StrictModel
from outpace.drafting.merged import Merge
from outpace.drafting.model_drafter import DraftModel
from outpace.drafting.sampled_trees import TopK, WithReplacement
from outpace.methods.draft_model.tree_settings import Branching, check_first_level
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Target


class SpecInfer(Merge):
    """The merged trees of ``drafts``, each a model over the target's vocabulary, all of one shape."""

    def __init__(self, drafts: Seq[Target], branching: Branching, *, sampled: bool, names: Seq[str] = ()) -> None:
        builder = partial(WithReplacement if sampled else TopK, branching=branching)
        proposal = Proposal(tree=True, sampled=sampled)
        names = names or [f"draft model {index}" for index in range(1, len(drafts) + 1)]
        super().__init__([DraftModel(draft, builder, proposal) for draft in drafts], names)


class SpecInferSettings(StrictModel):
    """Settings of ``specinfer``."""

    branching: Branching = Field(
        (2, 1, 1, 1),
        min_length=1,
        description="children of a node, level by level; if not given, the number of levels follows measured "
        "costs and acceptance",
    )
    max_nodes: int = Field(16, ge=1, le=512, description="draws of one draft model; a node is not expanded beyond it")
    expansion: Literal["sampled", "top-k"] = Field(
        "sampled",
        description="children drawn with their q (at temperature 0 the most probable), or the most probable tokens",
    )

    @model_validator(mode="after")
    def _room(self) -> Self:
        check_first_level(self.branching, self.max_nodes)
        return self


@register(
    "specinfer",
    family="draft-model",
    paper="Miao et al. 2024, arXiv 2305.09781",
    needs=("draft model",),
    summary="Merges the trees of several draft models, each draw with its own q.",
    when_to_use="Draft models that predict different tokens, with a target whose forward pass costs little more "
    "for additional rows. Not for draft models that agree: the second one then adds only cost.",
    tiny={"branching": (1,)},
)
def build(context: Context, settings: SpecInferSettings) -> Parts:
    """All draft models that the caller named. Raises BadInput where there is none."""
    names, drafts = zip(*context.drafts(), strict=True)
    drafter = SpecInfer(drafts, settings.branching, sampled=settings.expansion == "sampled", names=names)
    length = len(settings.branching) if "branching" in settings.model_fields_set else None
    costs = [draft.costs for draft in drafts]
    controller = draft_length(
        context.target.costs, costs, length, branching=settings.branching, max_nodes=settings.max_nodes
    )
    return Parts(drafter, CombinedController([controller] * len(drafts), united=True))

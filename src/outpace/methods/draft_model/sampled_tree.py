"""Trees sampled from a draft model, each draw with its true q.

``sampled-tree``: siblings drawn with replacement, as in SpecInfer's multi-step speculative sampling (Miao et al. 2024,
arXiv 2305.09781), or the likeliest tokens and one sampled from the rest (Hu et al. 2025, arXiv 2502.18779). See ``rsd``
for siblings drawn without replacement. At temperature 0 all siblings are the likeliest tokens.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.core.proposal import Proposal
from outpace.drafting.sampled_trees import GreedyPlusOne, WithReplacement
from outpace.methods.draft_model.tree_settings import TreeSettings, sampled_tree_parts
from outpace.methods.registry import Context, Parts, register


class SampledTreeSettings(TreeSettings):
    """Settings of ``sampled-tree``."""

    draws: Literal["replacement", "greedy"] = Field(
        "replacement", description="siblings drawn independently, or the most probable tokens and one sampled"
    )


@register(
    "sampled-tree",
    family="draft-model",
    paper="Miao et al. 2024, arXiv 2305.09781; Hu et al. 2025, arXiv 2502.18779",
    needs=("draft model",),
    summary="A draft model's tree of siblings sampled with replacement, or the most probable ones and one sampled.",
    when_to_use="A fast draft model. If its distributions are peaked, independent draws repeat and rsd wastes "
    "fewer rows.",
    tiny={"branching": (2, 1)},
)
def build(context: Context, settings: SampledTreeSettings) -> Parts:
    """Draws with replacement, or greedy plus one."""
    if settings.draws == "greedy":
        proposal = Proposal(tree=True, sampled=True, one_sampled_sibling=True)
        return sampled_tree_parts(context, GreedyPlusOne, proposal, settings.branching, settings)
    return sampled_tree_parts(context, WithReplacement, Proposal(tree=True, sampled=True), settings.branching, settings)

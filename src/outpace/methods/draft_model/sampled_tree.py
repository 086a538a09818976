"""Trees sampled from a draft model, each draw with its true q.

``rsd`` (recursive speculative decoding, Jeon et al. 2024, arXiv 2402.14160): siblings are drawn without replacement,
by Gumbel-top-k with a constant branching per level, or as a stochastic beam. ``sampled-tree``: siblings drawn with
replacement, as SpecInfer's multi-step speculative sampling has them (Miao et al. 2024, arXiv 2305.09781), or the
likeliest tokens and one sampled from the rest (Hu et al. 2025, arXiv 2502.18779).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.core.proposal import Proposal
from outpace.drafting.sampled_trees import (
    GreedyPlusOne,
    WithReplacement,
)
from outpace.methods.draft_model.tree_settings import TreeSettings, _parts
from outpace.methods.registry import Context, Parts, register


class SampledTreeSettings(TreeSettings):
    """Settings of ``sampled-tree``."""

    draws: Literal["replacement", "greedy"] = Field(
        "replacement", description="siblings drawn independently, or the likeliest tokens and one sampled"
    )


@register(
    "sampled-tree",
    family="draft-model",
    paper="Miao et al. 2024, arXiv 2305.09781; Hu et al. 2025, arXiv 2502.18779",
    summary="A draft model's tree of siblings sampled with replacement, or the likeliest and one sampled.",
    when_to_use="Above temperature 0 with a quick draft model; where it is sure of itself, draws repeat and rsd "
    "wastes less.",
    needs=("draft model",),
    tiny={"branching": (2, 1)},
)
def build_sampled_tree(context: Context, settings: SampledTreeSettings) -> Parts:
    """Draws with replacement, or greedy plus one."""
    if settings.draws == "greedy":
        proposal = Proposal(tree=True, sampled=True, one_sampled_sibling=True)
        return _parts(context, GreedyPlusOne, proposal, settings.branching, settings)
    return _parts(context, WithReplacement, Proposal(tree=True, sampled=True), settings.branching, settings)

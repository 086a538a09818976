"""Settings that the methods of the EAGLE family share, and how a method is put together from them."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.drafting.calibration import Calibration
from outpace.drafting.dynamic_tree import DynamicTree, SampledTree, by_confidence, by_rank
from outpace.drafting.namespaces import Namespaces
from outpace.drafting.sampled_trees import WithoutReplacement
from outpace.drafting.tree_builder import ChainBuilder, TreeBuilder
from outpace.heads.feature_drafter import CandidateTree, FeatureDrafter
from outpace.heads.feature_net import Net
from outpace.methods.registry import Context, Parts
from outpace.targets.base import Sequence

MOST = 24
"""Draft tokens of a round that is as large as pays."""
Mode = Literal["tree", "sampled", "chain"]


class FeatureSettings(BaseModel):
    """Settings of ``eagle``, ``eagle2`` and ``eagle3``."""

    model_config = ConfigDict(extra="forbid")

    mode: Mode = Field(
        "tree", description="likeliest paths; or, above temperature 0, a tree sampled without replacement or a chain"
    )
    nodes: int | None = Field(None, ge=0, le=512, description="draft tokens a round; by default what pays")
    depth: int = Field(6, ge=1, le=64, description="draft tokens on a path, where nodes are given and in samples")
    width: int = Field(6, ge=1, le=64, description="tokens that are looked at after a node; 1 drafts a chain")
    expand: int = Field(4, ge=1, le=64, description="most nodes that are run at once")
    branching: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(
        (3, 2, 1, 1), min_length=1, description="draws after each node of a sampled tree, level by level"
    )
    confidence: float = Field(
        0.0, ge=0.0, le=1.0, description="stop before the next draw when the largest probability is lower"
    )


class FeatureMethod(FeatureDrafter):
    """A feature drafter whose drafts are what the settings say."""

    def __init__(self, net: Net, settings: FeatureSettings, *, confident: bool) -> None:
        proposals = {
            "tree": Proposal(tree=settings.width > 1),
            "sampled": Proposal(tree=True, sampled=True, replacement=False),
            "chain": Proposal(sampled=True),
        }
        super().__init__(net, self._candidate_tree, proposals[settings.mode])
        self._settings, self._confident = settings, confident
        self._whole_ids = torch.tensor(net.ids)
        self._memories = Namespaces(lambda: Calibration(by_confidence if confident else by_rank))

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self._memories.open(sequence)

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        super().fork(sequence, twin)
        self._memories.open(twin)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._memories.close(sequence)

    def _candidate_tree(self, sequence: Sequence, budget: Budget, level: float) -> CandidateTree:
        if self._settings.mode != "tree" and not sequence.params.greedy:
            return SampledTree(self._builder(sequence, budget), self._whole_ids, self.net.vocab_size)
        return DynamicTree(
            budget,
            self._memories[sequence],
            self.net.ids,
            expand=self._settings.expand,
            confident=self._confident,
            inverse_temperature=1.0 if sequence.params.greedy else 1.0 / max(sequence.params.temperature, 1e-3),
            level=level,
        )

    def _builder(self, sequence: Sequence, budget: Budget) -> TreeBuilder:
        if self._settings.mode == "chain":
            return ChainBuilder(sequence, budget, self.chance(sequence))
        return WithoutReplacement(sequence, budget, self.chance(sequence), self._settings.branching)


def feature_parts(context: Context, net: Net, settings: FeatureSettings, *, confident: bool) -> Parts:
    """Drafter and controller. ``confident``: whether trees go by the drafter's probabilities or by ranks alone."""
    return Parts(FeatureMethod(net, settings, confident=confident), _controller(context, settings))


def _controller(context: Context, settings: FeatureSettings) -> Controller:
    if settings.mode == "chain":
        nodes = settings.depth if settings.nodes is None else settings.nodes
        return Fixed(settings.depth, 1, nodes, settings.confidence)
    if settings.mode == "sampled":
        drawn = sum(accumulate(settings.branching, mul))
        nodes = drawn if settings.nodes is None else settings.nodes
        return Fixed(len(settings.branching), max(settings.branching), nodes, settings.confidence)
    if settings.nodes is None and settings.confidence == 0.0:
        return CostModel(context.target.costs, MOST, settings.width)
    nodes = 32 if settings.nodes is None else settings.nodes
    return Fixed(settings.depth, settings.width, nodes, settings.confidence)

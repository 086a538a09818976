"""How the methods of the EAGLE family are put together from a head's network and their settings."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any

import torch

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.drafting.candidate_tree import CandidateTree
from outpace.drafting.dynamic_tree import DynamicTree, by_confidence, by_rank
from outpace.drafting.mixed_tree import MixedTree, by_probability
from outpace.drafting.sampled_trees import SampledTree, WithoutReplacement
from outpace.drafting.tree_builder import ChainBuilder, TreeBuilder
from outpace.heads.feature_drafter import FeatureDrafter, FeatureState
from outpace.heads.feature_net import Net
from outpace.methods.learned.eagle.feature_settings import FeatureSettings, Mode
from outpace.methods.registry import Context, Parts

MOST = 24
"""Most draft tokens of a round whose size follows from measured costs."""


class FeatureMethod(FeatureDrafter):
    """A feature drafter whose drafts are what the settings say.

    ``confident``: dynamic trees are chosen by the drafter's probabilities; otherwise by ranks among siblings alone.
    """

    def __init__(self, net: Net, settings: FeatureSettings, *, confident: bool) -> None:
        proposals = {
            "tree": Proposal(tree=settings.topk > 1),
            "sampled": Proposal(tree=True, sampled=True, replacement=False),
            "chain": Proposal(sampled=True, shares_noise=True),
            # Where the request's rule shares its noise nothing is drawn: every token is deterministic.
            "mixed": Proposal(settings.topk > 1, True, one_sampled_sibling=settings.topk > 1, shares_noise=True),
        }
        self._settings, self._confident, self._mode = settings, confident, mode_of(settings, confident)
        super().__init__(net, proposals[self._mode], _rate if confident else by_rank, settings.recent_tokens)
        self.weighs_costs = self._mode in ("tree", "mixed")
        self._whole_ids = torch.tensor(net.ids.tolist())

    def start(self, state: FeatureState, budget: Budget, level_cost: float) -> CandidateTree:
        params = state.sequence.params
        mixed = self._mode == "mixed"
        if mixed and not params.greedy and state.sequence.noise is None:
            return MixedTree(
                params,
                budget,
                state.calibration,
                self.net.ids,
                self._whole_ids,
                self.chance(state.sequence),
                expand=self._settings.expand,
                heat=self._settings.heat,
                level=level_cost,
                open_rows=state.sequence.sampler.open_rows,
            )
        if self._mode in ("sampled", "chain") and not params.greedy:
            return SampledTree(self._builder(state, budget), self._whole_ids, self.net.vocab_size)
        return DynamicTree(
            budget,
            state.calibration,
            self.net.ids,
            expand=self._settings.expand,
            confident=self._confident,
            inverse_temperature=1.0 if params.greedy else 1.0 / max(params.temperature, 1e-3),
            level=level_cost,
        )

    def _builder(self, state: FeatureState, budget: Budget) -> TreeBuilder:
        sequence, chance = state.sequence, self.chance(state.sequence)
        if self._mode == "chain":
            return ChainBuilder(sequence, budget, chance)
        return WithoutReplacement(sequence, budget, chance, self._settings.branching)


def mode_of(settings: FeatureSettings, confident: bool) -> Mode:
    """How a method drafts above temperature 0."""
    return settings.mode or ("mixed" if confident else "tree")


def _rate(kind: Any) -> float:
    return by_confidence(kind) if len(kind) == 2 else by_probability(kind)


def feature_parts(context: Context, net: Net, settings: FeatureSettings, *, confident: bool) -> Parts:
    """Drafter and controller of a method; ``confident`` as for :class:`FeatureMethod`."""
    drafter = FeatureMethod(net, settings, confident=confident)
    # Beside one draw, made first, top-down rejection accepts as much as univer, and needs p only where it arrives.
    rule = RecursiveRejection() if drafter.proposal.one_sampled_sibling else None
    return Parts(drafter, _controller(context, settings), rule)


def _controller(context: Context, settings: FeatureSettings) -> Controller:
    nodes = settings.max_nodes
    if settings.mode == "chain":
        return Fixed(settings.depth, 1, settings.depth if nodes is None else nodes, settings.confidence)
    if settings.mode == "sampled":
        drawn = sum(accumulate(settings.branching, mul)) if nodes is None else nodes
        return Fixed(len(settings.branching), max(settings.branching), drawn, settings.confidence)
    if nodes is None and settings.confidence == 0.0:
        return CostModel(context.target.costs, MOST, settings.topk)
    return Fixed(settings.depth, settings.topk, 32 if nodes is None else nodes, settings.confidence)

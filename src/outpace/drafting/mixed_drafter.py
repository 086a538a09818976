"""MixedDraftModel: a draft model drafts likely tokens with one draw beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outpace.controllers.base import Budget
from outpace.core.proposal import Proposal
from outpace.core.token_distribution import TokenDistribution
from outpace.drafting.calibration import Calibration
from outpace.drafting.dynamic_tree_builder import DynamicTreeBuilder
from outpace.drafting.mixed_tree import MixedTree, by_probability
from outpace.drafting.model_drafter import DraftModel, ModelDraftState
from outpace.drafting.namespaces import Namespaces
from outpace.drafting.tree_builder import TreeBuilder
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from torch import Tensor


class MixedTreeBuilder(DynamicTreeBuilder):
    """A draft model runs the rows that a mixed tree asks for, after the request's bias, penalties and processors."""

    def _rows(self, logits: Tensor) -> Tensor:
        return self._distribution(logits).processed(self._asked)

    def learn(self, committed: Seq[int], target_row: Callable[[int], TokenDistribution] | None = None) -> None:
        self._candidates.learn(committed, target_row)


@dataclass(slots=True)
class MixedState(ModelDraftState):
    """``calibration``: acceptance rates of the request's namespace."""

    calibration: Calibration = field(kw_only=True)


class MixedDraftModel(DraftModel):
    """Drafts mixed trees above temperature 0, and the most probable paths at 0; ``topk`` 1: chains.

    Where the request's rule shares its noise, nothing is drawn either."""

    def __init__(self, draft: Target, topk: int) -> None:
        proposal = Proposal(topk > 1, True, one_sampled_sibling=topk > 1, shares_noise=True)
        super().__init__(draft, DynamicTreeBuilder, proposal)
        self._calibrations = Namespaces(lambda: Calibration(by_probability))

    def begin(self, sequence: Sequence) -> MixedState:
        draft_sequence = super().begin(sequence).draft_sequence
        return MixedState(sequence, draft_sequence, calibration=self._calibrations.open(sequence))

    def start(self, state: ModelDraftState, budget: Budget) -> TreeBuilder:
        assert isinstance(state, MixedState)
        sequence = state.draft_sequence
        if sequence.params.greedy or sequence.noise is not None:
            return super().start(state, budget)
        chance = self.chance(state.sequence)
        candidates = MixedTree(
            sequence.params,
            budget,
            state.calibration,
            range(sequence.sampler.vocab_size),
            None,
            chance,
            expand=budget.max_nodes,
            open_rows=sequence.sampler.open_rows,
        )
        return MixedTreeBuilder(sequence, budget, chance, candidates)

"""Drafts of a draft LM that was distilled from this very target (``distill``, Zhou et al. 2024, arXiv 2310.08461).

The head runs beside the target as a small target of its own (``target.py``), so that everything that drafts with a
draft model drafts with it: sampled chains and trees with their true q, and by default a :class:`DynamicTree` of its
likeliest paths, deterministic at every temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from outpace.controllers.base import Budget
from outpace.core.proposal import Proposal
from outpace.drafting.calibration import Calibration
from outpace.drafting.dynamic_tree import DynamicTree, by_confidence
from outpace.drafting.dynamic_tree_builder import DynamicTreeBuilder
from outpace.drafting.model_drafter import DraftModel, ModelDraftState
from outpace.drafting.namespaces import Namespaces
from outpace.drafting.tree_builder import TreeBuilder
from outpace.methods.learned.distill.target import HeadTarget
from outpace.targets.base import Sequence, Target

LEVEL = 0.06
"""Cost of drafting another level where costs are fixed, in autoregressive steps."""
_LEVEL_ROWS = 2


@dataclass(slots=True)
class DistillState(ModelDraftState):
    """A request, and the acceptance rates of its namespace."""

    calibration: Calibration


class ReducedTreeBuilder(DynamicTreeBuilder):
    """A dynamic tree over the reduced vocabulary of ``head``: its logits, (rows, Vd), are read as they are.

    Where penalties, a grammar or a logit bias change them (``processed``), they are widened and processed first.
    """

    head: HeadTarget
    processed = False

    def _rows(self, logits: Tensor) -> Tensor:
        if self.processed:
            return self._distribution(self.head.widened(logits)).processed(self._asked)
        return logits[[self._lag + node + 1 for node in self._asked]]


class DistillDrafter(DraftModel):
    """Drafts deterministic trees with ``draft`` for ``target``, and learns how often its candidates are right."""

    def __init__(self, draft: HeadTarget, target: Target, *, tree: bool = True) -> None:
        super().__init__(draft, proposal=Proposal(tree=tree))
        self._head, self._target = draft, target
        self.weighs_costs = True
        self._calibrations = Namespaces(lambda: Calibration(by_confidence))

    @cached_property
    def _level(self) -> float:
        return self._target.costs.steps(lambda: self._head.costs.seconds(_LEVEL_ROWS), LEVEL)

    def begin(self, sequence: Sequence) -> DistillState:
        draft_sequence = super().begin(sequence).draft_sequence
        return DistillState(sequence, draft_sequence, self._calibrations.open(sequence))

    def start(self, state: ModelDraftState, budget: Budget) -> TreeBuilder:
        assert isinstance(state, DistillState)
        params = state.sequence.params
        level = self._level if budget.relative_costs else 0.0
        processed = params.path_dependent or bool(params.logit_bias)
        candidates = DynamicTree(
            budget,
            state.calibration,
            range(self._head.vocab_size) if processed else self._head.word_list,
            expand=budget.max_nodes,
            inverse_temperature=1.0 if params.greedy else 1.0 / params.temperature,
            level=level,
        )
        builder = ReducedTreeBuilder(state.draft_sequence, budget, self.chance(state.sequence), candidates)
        builder.head, builder.processed = self._head, processed
        return builder

"""Drafts of a draft LM that was distilled from this very target (``distill``, Zhou et al. 2024, arXiv 2310.08461).

The head runs beside the target as a small target of its own (``target.py``), so that everything that drafts with a
draft model drafts with it: sampled chains and trees with their true q, and by default a :class:`DynamicTree` of its
likeliest paths, deterministic at every temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from pydantic import Field
from torch import Tensor

from outpace.controllers.base import Budget
from outpace.controllers.cost_model import CostModel
from outpace.controllers.draft_length import DraftLength
from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.core.validation import StrictModel
from outpace.drafting.calibration import Calibration
from outpace.drafting.dynamic_tree import DynamicTree, DynamicTreeBuilder, by_confidence
from outpace.drafting.model_drafter import DraftModel, ModelDraftState
from outpace.drafting.namespaces import Namespaces
from outpace.drafting.sampled_trees import WithoutReplacement
from outpace.drafting.tree_builder import TreeBuilder
from outpace.methods.draft_model.tree_settings import Branching
from outpace.methods.learned.distill.network import DraftLm
from outpace.methods.learned.distill.target import HeadTarget
from outpace.methods.registry import Context, Parts, register
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


class DistillSettings(StrictModel):
    """Settings of ``distill``."""

    draft: Literal["likeliest", "sampled", "sampled-tree"] = Field(
        "likeliest", description="the most probable paths, a sampled chain, or a tree drawn without replacement"
    )
    topk: int = Field(
        4, ge=1, le=64, description="for draft=likeliest: maximum number of children per node; 1: a chain"
    )
    max_nodes: int | None = Field(
        None, ge=0, le=512, description="draft tokens per round; by default from measured costs and acceptance"
    )
    depth: int = Field(
        5,
        ge=0,
        le=64,
        description="draft tokens on a path, if max_nodes is given; for sampled chains by default from measured costs",
    )
    branching: Branching = Field((3, 2, 1, 1), min_length=1, description="sampled-tree: draws after each node")
    confidence: float = Field(
        0.3, ge=0.0, le=1.0, description="sampled: stop before the next draw when the largest probability is lower"
    )


@register(
    "distill",
    family="trained",
    paper="Zhou et al. 2024, arXiv 2310.08461",
    summary="A small draft LM, distilled from this target, drafts its most probable paths or its own samples.",
    when_to_use="Open-ended text with a target that is slow compared with a few small layers. Drafters that read "
    "the target's hidden states have longer accepted lengths for the same cost.",
    aliases=("distillspec", "draft-lm"),
    head="draft-lm",
    tiny={"max_nodes": 3, "depth": 2, "topk": 2},
)
def build(context: Context, settings: DistillSettings) -> Parts:
    """The draft LM that was named or is shipped, beside the target. Raises BadInput where there is none."""
    head, target, most = context.head("draft-lm"), context.target, settings.max_nodes
    assert isinstance(head, DraftLm)
    if settings.draft == "likeliest":
        drafter = DistillDrafter(HeadTarget(head, target), target, tree=settings.topk > 1)
        if most is None:
            return Parts(drafter, CostModel(target.costs, width=settings.topk))
        return Parts(drafter, Fixed(settings.depth, settings.topk, most))
    draft = HeadTarget(head, target, widened=True)
    if settings.draft == "sampled":
        if most is None and "depth" not in settings.model_fields_set:
            return Parts(DraftModel(draft), DraftLength(target.costs, [draft.costs], confidence=settings.confidence))
        length = settings.depth if most is None else min(settings.depth, most)
        return Parts(DraftModel(draft), Fixed(length, confidence=settings.confidence))
    builder = partial(WithoutReplacement, branching=settings.branching)
    controller = Fixed(
        len(settings.branching), max(settings.branching), 32 if most is None else most, settings.confidence
    )
    return Parts(DraftModel(draft, builder, Proposal(tree=True, sampled=True, replacement=False)), controller)

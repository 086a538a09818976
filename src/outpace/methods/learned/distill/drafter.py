"""Drafts of a draft LM that was distilled from this very target (DistillSpec, Zhou et al. 2024, arXiv 2310.08461).

The head runs beside the target as a small target of its own (``target.py``), so that all that
drafts with a draft model drafts with it: sampled chains and trees with their true q. It borrows the target's embedding
and says a reduced vocabulary; sampled drafts restore the whole one, deterministic ones choose among its words and
never build it.

By default it drafts a tree of its likeliest paths, whose estimates are the acceptance that candidates as sure as these
have had, and stops before the level that would cost more than it promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.proposal import Proposal
from outpace.core.tree import ROOT, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.best_first import FLOOR
from outpace.drafting.calibration import Calibration, Kind
from outpace.drafting.marginals import certainty, levels_of, prior
from outpace.drafting.model_drafter import DraftModel
from outpace.drafting.namespaces import Namespaces
from outpace.drafting.sampled_trees import WithoutReplacement
from outpace.drafting.tree_builder import ChainBuilder, TreeBuilder
from outpace.methods.draft_model.tree_settings import Branching
from outpace.methods.learned.distill.network import DraftLm
from outpace.methods.learned.distill.target import HeadTarget
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target, TreeScores

LEVEL = 0.06
"""What drafting another level costs where no clock may be asked, in plain steps."""
CHILDREN = 0.7
"""About how much of a path's estimate its likeliest continuations keep."""
_LEVEL_ROWS = 2


class _Wide(TreeBuilder):
    """A growth that reads the whole vocabulary, restored from a draft LM's words."""

    draft: HeadTarget

    def _distribution(self, logits: Tensor) -> TreeDistribution:
        return TreeDistribution(self.sequence.sampler, self._drafted, self.draft.widened(logits[self._lag :]))


class WordChain(_Wide, ChainBuilder):
    """A chain, sampled above temperature 0."""


class WordTree(_Wide, WithoutReplacement):
    """A tree of siblings drawn without replacement above temperature 0."""


@dataclass(slots=True)
class _Candidate:
    parent: int
    token: int
    kind: Kind
    path_acceptance_prob: float


class PromisingTree(TreeBuilder):
    """The paths most likely to be accepted, at most ``width`` children a node; deterministic at every temperature.

    A candidate's kind is (depth, rank, certainty); ``rate`` says how often its kind is right, and ``level`` what
    running another level costs, in plain steps.
    """

    def __init__(
        self,
        sequence: Sequence,
        budget: Budget,
        chance: Chance,
        draft: HeadTarget,
        rate: Callable[[Kind], float],
        level: float,
    ) -> None:
        super().__init__(sequence, budget, chance)
        self.draft, self.rate, self.level = draft, rate, level
        self.length = len(sequence.tokens)
        self._candidates: list[_Candidate] = []
        self._frontier: list[tuple[int, int]] = [(ROOT, ROOT)]
        """Nodes that were just run, as (node of ``_drafted``, candidate)."""

    def grow(self, logits: Tensor) -> bool:
        first = len(self._candidates)
        self._depth += 1
        self._expand(logits)
        if not self.budget.wants(self._depth + 1):
            return False
        nodes = {candidate: node for node, candidate in self._frontier}
        self._frontier = [
            (self._run_after(nodes[self._candidates[index].parent], self._candidates[index].token), index)
            for index in self._worth_running(first)
        ]
        return bool(self._frontier)

    def _expand(self, logits: Tensor) -> None:
        params = self.sequence.params
        nodes = [node for node, _ in self._frontier]
        if params.path_dependent or params.logit_bias:
            distribution = TreeDistribution(
                self.sequence.sampler, self._drafted, self.draft.widened(logits[self._lag :])
            )
            rows = distribution.processed(nodes)
            words = list(range(self.draft.vocab_size))
        else:
            rows = logits[[self._lag + node + 1 for node in nodes]]
            words = self.draft.word_list
        alive = [index for index, best in enumerate(rows.amax(-1).tolist()) if best > -math.inf]
        levels = levels_of(rows[alive], words, self.budget.width, params.temperature) if alive else []
        for index, level in zip(alive, levels, strict=True):
            parent = self._frontier[index][1]
            before = 1.0 if parent == ROOT else self._candidates[parent].path_acceptance_prob
            if not self.budget.wants(self._depth, math.exp(level.logs[0])):
                continue
            for rank, (token, log) in enumerate(zip(level.tokens, level.logs, strict=True)):
                kind = (min(self._depth, 3), rank, certainty(log))
                path_acceptance_prob = before * self.rate(kind)
                if log > -math.inf and path_acceptance_prob >= FLOOR:
                    self._candidates.append(_Candidate(parent, token, kind, path_acceptance_prob))

    def _best(self) -> list[int]:
        """The best ``nodes`` candidates, best first; of equals the earlier, so that parents come before children."""
        order = sorted(
            range(len(self._candidates)), key=lambda index: (-self._candidates[index].path_acceptance_prob, index)
        )
        return order[: self.budget.nodes]

    def _worth_running(self, first: int) -> list[int]:
        """Candidates from ``first`` on whose continuations may pay: for the level, and for their place in the tree."""
        best, relative_costs = self._best(), self.budget.relative_costs
        fresh = sorted(index for index in best if index >= first)
        if not relative_costs:
            return fresh
        path_acceptance_probs = [self._candidates[index].path_acceptance_prob for index in best]
        count = self.budget.best_draft_size(path_acceptance_probs)
        pace = (1.0 + sum(path_acceptance_probs[:count])) / relative_costs[count]
        last = min(count + 1, len(relative_costs) - 1)
        slope = relative_costs[last] - relative_costs[last - 1] if last > 1 else 0.0
        gains = {index: CHILDREN * self._candidates[index].path_acceptance_prob - pace * slope for index in fresh}
        running = [index for index in fresh if gains[index] > 0.0]
        return running if sum(gains[index] for index in running) > pace * self.level else []

    def grown(self) -> tuple[TokenTree, list[Kind]]:
        """All candidates that there was room for, by estimate, and their kinds."""
        tree, kinds, where = TokenTree(), list[Kind](), {ROOT: ROOT}
        for index in self._best():
            one = self._candidates[index]
            where[index] = tree.add(where[one.parent], one.token, path_acceptance_prob=one.path_acceptance_prob)
            kinds.append(one.kind)
        return tree, kinds

    def proposal(self) -> TokenTree:
        tree, _ = self.grown()
        count = self.budget.best_draft_size(tree.path_acceptance_probs)
        return tree if count == len(tree) else tree.first(count)


class Distilled(DraftModel):
    """Drafts deterministic trees of ``draft`` for ``target``, and learns how often candidates of a kind are right."""

    def __init__(self, draft: HeadTarget, target: Target, *, tree: bool = True) -> None:
        super().__init__(draft, self._start, Proposal(tree=tree))
        self._target = target
        self._calibrations = Namespaces(lambda: Calibration(prior))
        self._owners: dict[Sequence, Sequence] = {}
        self._grown: dict[Sequence, PromisingTree] = {}

    @cached_property
    def _level(self) -> float:
        return self.draft.costs.seconds(_LEVEL_ROWS) / self._target.costs.seconds(1)

    def _start(self, own: Sequence, budget: Budget, chance: Chance) -> PromisingTree:
        sequence = self._owners[own]
        level = 0.0 if not budget.relative_costs else self._level if sequence.params.greedy else LEVEL
        assert isinstance(self.draft, HeadTarget)
        builder = PromisingTree(own, budget, chance, self.draft, self._calibrations[sequence].rate, level)
        self._grown[sequence] = builder
        return builder

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self._opened(sequence)

    def _opened(self, sequence: Sequence) -> None:
        self._owners[self._twins[sequence].sequence] = sequence
        self._calibrations.open(sequence)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        for sequence in sequences:
            self._grown.pop(sequence, None)
        return super().propose(sequences, budgets)

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        super().observe(sequences, scores, verdicts)
        for sequence in sequences:
            builder = self._grown.pop(sequence, None)
            if builder is not None:
                tree, kinds = builder.grown()
                self._calibrations[sequence].learn_tree(tree, kinds, sequence.tokens[builder.length :])

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        super().fork(sequence, twin)
        self._opened(twin)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        super().rewind(sequence, kept)
        self._grown.pop(sequence, None)

    def end(self, sequence: Sequence) -> None:
        own = self._twins.get(sequence)
        if own is not None:
            self._owners.pop(own.sequence, None)
        self._grown.pop(sequence, None)
        self._calibrations.close(sequence)
        super().end(sequence)


def sampling(draft: HeadTarget, branching: tuple[int, ...] = ()) -> DraftModel:
    """A drafter of sampled chains, or with ``branching`` of trees drawn without replacement."""

    def start(sequence: Sequence, budget: Budget, chance: Chance) -> TreeBuilder:
        builder = WordTree(sequence, budget, chance, branching) if branching else WordChain(sequence, budget, chance)
        builder.draft = draft
        return builder

    if branching:
        return DraftModel(draft, start, Proposal(tree=True, sampled=True, replacement=False))
    return DraftModel(draft, start, Proposal(sampled=True))


class DistillSettings(BaseModel):
    """Settings of ``distill``."""

    model_config = ConfigDict(extra="forbid")

    draft: Literal["likeliest", "sampled", "sampled-tree"] = Field(
        "likeliest", description="the likeliest paths, a sampled chain, or a tree drawn without replacement"
    )
    width: int = Field(4, ge=1, le=64, description="likeliest: most children of a node; 1: a chain")
    nodes: int | None = Field(None, ge=0, le=512, description="draft tokens a round; by default what pays")
    depth: int = Field(5, ge=0, le=64, description="draft tokens on a path, where nodes are given or draws sampled")
    branching: Branching = Field((3, 2, 1, 1), min_length=1, description="sampled-tree: draws after each node")
    confidence: float = Field(
        0.3, ge=0.0, le=1.0, description="sampled: stop before the next draw when the largest probability is lower"
    )


@register(
    "distill",
    family="trained",
    paper="Zhou et al. 2024, arXiv 2310.08461",
    summary="A small draft LM, distilled from this very target, drafts its likeliest paths or samples of its own.",
    when_to_use="On open-ended text beside a target that is slow against a few small layers. Drafters that read the "
    "target's "
    "states accept more for the same cost.",
    aliases=("distillspec", "draft-lm"),
    head="draft-lm",
    tiny={"nodes": 3, "depth": 2, "width": 2},
)
def build(context: Context, settings: DistillSettings) -> Parts:
    """The draft LM that was named or is shipped, beside the target."""
    head = context.head("draft-lm")
    assert isinstance(head, DraftLm)
    draft = HeadTarget(head, context.target)
    if settings.draft == "sampled":
        length = min(settings.depth, 64 if settings.nodes is None else settings.nodes)
        return Parts(sampling(draft), Fixed(length, confidence=settings.confidence))
    if settings.draft == "sampled-tree":
        nodes = 32 if settings.nodes is None else settings.nodes
        controller = Fixed(len(settings.branching), max(settings.branching), nodes, settings.confidence)
        return Parts(sampling(draft, settings.branching), controller)
    drafter = Distilled(draft, context.target, tree=settings.width > 1)
    if settings.nodes is None:
        return Parts(drafter, CostModel(context.target.costs, width=settings.width))
    return Parts(drafter, Fixed(settings.depth, settings.width, settings.nodes))

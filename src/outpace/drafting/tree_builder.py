"""How a draft grows from the scores of a probabilistic drafter: a sampled chain, or a tree of the likeliest paths.

A :class:`TreeBuilder` keeps two trees: ``run``, what the draft model has to run, and the proposal. They differ:
committed tokens that the draft model has not seen come first in ``run``, and what is drafted last is never run.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.tree import ROOT, QRow, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.targets.base import FULL, Scores, Sequence, SubGraph, Target


class TreeBuilder(ABC):
    """One draft under construction: ``run`` is scored and ``grow`` reads the scores, until it says that it is done."""

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance) -> None:
        self.sequence = sequence
        self.budget = budget
        self.chance = chance
        self.run = TokenTree()
        self._drafted = TokenTree()
        """The nodes of ``run`` after the catch-up: what the sampler, which knows all committed tokens, lacks."""
        self._lag = 0
        self._depth = 0

    def catch_up(self, tokens: Iterable[int]) -> None:
        """Committed tokens after the draft model's root, run before the draft. Called once, before the first score."""
        node = ROOT
        for token in tokens:
            node = self.run.add(node, token)
        self._lag = len(self.run)

    def _run_after(self, parent: int, token: int) -> int:
        """Have a drafted token run; the node is one of ``_drafted``."""
        self.run.add(self._lag + parent, token)  # ROOT (-1) becomes the last caught-up node, or the root itself
        return self._drafted.add(parent, token)

    def _distribution(self, logits: Tensor) -> TreeDistribution:
        return TreeDistribution(self.sequence.sampler, self._drafted, logits[self._lag :])

    @abstractmethod
    def grow(self, logits: Tensor) -> bool:
        """Draft another level from the logits of ``run``, (1 + nodes, V). False when the draft is complete."""

    @abstractmethod
    def proposal(self) -> TokenTree:
        """The draft."""


def build_together(
    model: Target,
    sequences: Seq[Sequence],
    builders: Seq[TreeBuilder],
    graph: SubGraph = FULL,
    aux_hidden_state_layers: Seq[int] = (),
) -> Scores | None:
    """Run ``model`` over all growths, a level at a time, until each is complete; returns the last pass, over them all.

    Growths that are complete stay in the batch: their rows are not run again. None where there are none.
    """
    growing = list(builders)
    scores: Scores | None = None
    while growing:
        batch = [(sequence, builder.run) for sequence, builder in zip(sequences, builders, strict=True)]
        scores = model.score(batch, aux_hidden_state_layers, graph, scores)
        logits = {id(builder): part.logits for builder, part in zip(builders, scores.parts, strict=True)}
        growing = [builder for builder in growing if builder.grow(logits[id(builder)])]
    return scores


class ChainBuilder(TreeBuilder):
    """A chain: the argmax at temperature 0, else sampled from the processed distribution, which is its q row."""

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance) -> None:
        super().__init__(sequence, budget.limited(budget.nodes), chance)
        self._chain = TokenTree()

    def grow(self, logits: Tensor) -> bool:
        distribution, node = self._distribution(logits), len(self._drafted) - 1
        if distribution.dead_end(node) or not self.budget.wants(self._depth + 1, self._confidence(distribution, node)):
            return False
        self._draw(distribution, node)
        return self.budget.wants(self._depth + 1) and self._run_last()

    def _draw(self, distribution: TreeDistribution, node: int) -> None:
        """The next token of the chain, after ``node``."""
        last = len(self._chain) - 1
        if self.sequence.params.greedy:
            self._chain.add(last, distribution.argmax(node))
        else:
            q = distribution.p(node)
            self._chain.add(last, self.chance.categorical(q), QRow(q))
        self._depth += 1

    def _run_last(self) -> bool:
        self._run_after(len(self._drafted) - 1, self._chain.tokens[-1])
        return True

    def _confidence(self, distribution: TreeDistribution, node: int) -> float:
        if self.budget.confidence <= 0.0:
            return 1.0  # not asked for: spare a softmax over the vocabulary
        if self.sequence.params.greedy:
            return float(distribution.processed([node]).softmax(-1).max())
        return float(distribution.p(node).max())

    def proposal(self) -> TokenTree:
        return self._chain


@dataclass(slots=True)
class _Candidate:
    parent: int
    token: int
    log_q: float


class LikeliestTreeBuilder(TreeBuilder):
    """The ``nodes`` most probable paths with at most ``width`` children a node; deterministic at every temperature.

    A path is never more probable than its beginning, so what is outside the best ``nodes`` now has no descendant in
    the final tree and is not run; and the best ``nodes`` of all candidates are a tree.
    """

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance) -> None:
        super().__init__(sequence, budget, chance)
        self._candidates: list[_Candidate] = []
        self._frontier: list[tuple[int, int]] = [(ROOT, ROOT)]
        """Nodes that were just run, as (node of ``_drafted``, candidate)."""

    def grow(self, logits: Tensor) -> bool:
        first = len(self._candidates)
        self._depth += 1
        self._expand(self._log_q(self._distribution(logits)))
        if not self.budget.wants(self._depth + 1):
            return False
        nodes = {candidate: node for node, candidate in self._frontier}
        self._frontier = [
            (self._run_after(nodes[self._candidates[index].parent], self._candidates[index].token), index)
            for index in self._best()
            if index >= first
        ]
        return bool(self._frontier)

    def _log_q(self, distribution: TreeDistribution) -> Tensor:
        """Log-probabilities after every frontier node, (frontier, V); above temperature 0, as they would be sampled."""
        nodes = [node for node, _ in self._frontier]
        if self.sequence.params.greedy:
            return distribution.processed(nodes).log_softmax(-1)
        distribution.ensure(nodes)  # one vectorised pass
        empty = torch.zeros(self.sequence.sampler.vocab_size)
        return torch.stack([empty if distribution.dead_end(node) else distribution.p(node) for node in nodes]).log()

    def _expand(self, log_q: Tensor) -> None:
        values, tokens = log_q.topk(min(self.budget.width, log_q.shape[-1]), dim=-1)
        for (_, parent), row, ids in zip(self._frontier, values.tolist(), tokens.tolist(), strict=True):
            before = 0.0 if parent == ROOT else self._candidates[parent].log_q
            if self.budget.wants(self._depth, math.exp(row[0])):
                self._candidates += [
                    _Candidate(parent, token, before + min(0.0, value))
                    for value, token in zip(row, ids, strict=True)
                    if value > float("-inf")
                ]

    def _best(self) -> list[int]:
        """The best ``nodes`` candidates in the order they were found; of equals the earlier, so parents come along."""
        order = range(len(self._candidates))
        best = heapq.nsmallest(
            self.budget.nodes, order, key=lambda index: (-self.budget.priority(self._candidates[index].log_q), index)
        )
        return sorted(best)

    def proposal(self) -> TokenTree:
        tree, where = TokenTree(), {ROOT: ROOT}
        for index in self._best():
            one = self._candidates[index]
            where[index] = tree.add(where[one.parent], one.token, path_acceptance_prob=math.exp(one.log_q))
        return tree

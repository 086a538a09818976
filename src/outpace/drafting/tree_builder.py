"""TreeBuilder: one draft made from a draft model's logits, a level at a time; and the sampled chain.

A builder keeps two trees: ``run``, what the draft model has to run, and the proposal. They differ: committed tokens
that the draft model has not run come first in ``run``, and the tokens that are drafted last are never run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence as Seq
from typing import TYPE_CHECKING

from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.tree import ROOT, QRow, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.draft_token import draft_token
from outpace.targets.base import Scores, Sequence, Target
from outpace.targets.sub_graph import FULL, SubGraph

if TYPE_CHECKING:
    from torch import Tensor


class TreeBuilder(ABC):
    """One draft under construction: the model scores ``run`` and ``grow`` reads its logits, until ``grow`` is False."""

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance) -> None:
        self.sequence = sequence
        self.budget = budget
        self.chance = chance
        self.run = TokenTree()
        self._drafted = TokenTree()
        """The nodes of ``run`` after the catch-up: tokens that the sampler, which has all committed ones, lacks."""
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

    def _ranking(self, distribution: TreeDistribution, nodes: Seq[int]) -> Tensor:
        """Logits after ``nodes`` of ``_drafted``, (n, V), to rank tokens by; above temperature 0, the log of what would
        be sampled from. All -inf where nothing can follow."""
        import torch

        if self.sequence.params.greedy:
            return distribution.processed(nodes)
        distribution.ensure(nodes)  # one vectorised pass
        none = torch.zeros(self.sequence.sampler.vocab_size)
        return torch.stack([none if distribution.dead_end(node) else distribution.p(node) for node in nodes]).log()

    @abstractmethod
    def grow(self, logits: Tensor) -> bool:
        """Draft another level from the logits of ``run``, (1 + nodes, V). False when the draft is complete."""

    @abstractmethod
    def proposal(self) -> TokenTree:
        """The draft."""

    def learn(self, committed: Seq[int]) -> None:  # noqa: B027 - most have nothing to learn
        """The round is over: ``committed`` are its tokens. Builders without calibration ignore them."""


def build_together(
    model: Target,
    sequences: Seq[Sequence],
    builders: Seq[TreeBuilder],
    graph: SubGraph = FULL,
    aux_hidden_state_layers: Seq[int] = (),
) -> Scores | None:
    """Run ``model`` over all builders, a level at a time, until each is complete; returns the last forward, over all.

    Builders that are complete stay in the batch: their rows are not run again. None where there are no builders.
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
        super().__init__(sequence, budget.limited(budget.max_nodes), chance)
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
            q = distribution.at(node)
            ahead = 0 if node == ROOT else self._drafted.depths[node]
            self._chain.add(last, draft_token(self.sequence, ahead, q, self.chance), QRow(q))
        self._depth += 1

    def _run_last(self) -> bool:
        self._run_after(len(self._drafted) - 1, self._chain.tokens[-1])
        return True

    def _confidence(self, distribution: TreeDistribution, node: int) -> float:
        if self.budget.confidence <= 0.0:
            return 1.0  # not asked for: spare a softmax over the vocabulary
        if self.sequence.params.greedy:
            return float(distribution.processed([node]).softmax(-1).max())
        return distribution.at(node).highest()

    def proposal(self) -> TokenTree:
        return self._chain

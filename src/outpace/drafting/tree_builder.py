"""TreeBuilder: one draft made from a draft model's logits, a level at a time; and the sampled chain.

A builder keeps two trees: ``run``, what the draft model has to run, and the proposal. They differ: committed tokens
that the draft model has not run come first in ``run``, and the tokens that are drafted last are never run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence as Seq
from typing import TYPE_CHECKING

from outpace.controllers.base import Budget
from outpace.controllers.policy import WholeRow
from outpace.core.chance import Chance
from outpace.core.q_row import QRow
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import ROOT, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.draft_token import draft_token
from outpace.targets.base import Scores, Sequence, Target
from outpace.targets.sub_graph import FULL, SubGraph

if TYPE_CHECKING:
    from torch import Tensor


class TreeBuilder(ABC):
    """One draft under construction: the model scores ``run`` and ``grow`` reads its logits, until ``grow`` is False."""

    asks_policy = False
    """Whether it asks the budget's policy before each draw."""
    weighs_costs = False
    """Whether it drafts by the budget's relative costs, where there are any."""

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

    def _policy_draws(
        self, distribution: TreeDistribution, node: int, at: int, above: int, depth: int, width: int = 1
    ) -> bool:
        """Whether the budget's policy, where there is one, wants ``width`` draws at ``depth`` after ``node`` of
        ``_drafted``, which is ``at`` in the proposal, a child of ``above``. Asked before any of them is made."""
        if self.budget.policy is None:
            return True
        greedy = self.sequence.params.greedy

        def row() -> Tensor:
            return distribution.processed([node])[0].softmax(-1) if greedy else distribution.p(node)

        return self.budget.draws(at, None if at == ROOT else above, depth, WholeRow(row), width)

    @abstractmethod
    def grow(self, logits: Tensor) -> bool:
        """Draft another level from the logits of ``run``, (1 + nodes, V). False when the draft is complete."""

    @abstractmethod
    def proposal(self) -> TokenTree:
        """The draft."""

    def learn(  # noqa: B027 - most have nothing to learn
        self, committed: Seq[int], target_row: Callable[[int], TokenDistribution] | None = None
    ) -> None:
        """The round is over: ``committed`` are its tokens. ``target_row(i)``: the target's distribution after i of
        them; None at temperature 0. Builders without calibration ignore them."""


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

    asks_policy = True

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance) -> None:
        super().__init__(sequence, budget.limited(budget.max_nodes), chance)
        self._chain = TokenTree()

    def grow(self, logits: Tensor) -> bool:
        distribution, node = self._distribution(logits), len(self._drafted) - 1
        if distribution.dead_end(node) or not self.budget.wants(self._depth + 1, self._confidence(distribution, node)):
            return False
        last = len(self._chain) - 1
        if not self._policy_draws(distribution, node, last, last - 1, self._depth + 1):
            return False
        self._draw(distribution, node)
        return self.budget.runs(self._depth + 1) and self._run_last()

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

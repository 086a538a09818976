"""Builders of sampled draft trees: with replacement, without, stochastic beams, and greedy plus one sampled.

A level is shaped before any of its draws is made: how many draws a node gets never depends on what they turn out to be.
At temperature 0 a draft model's distribution is one-hot, and all draws after a node would be one token: there, trees of
the same shape are built of its likeliest tokens, which are deterministic draft tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.q_row import QRow
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import ROOT, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.candidate_tree import CandidateTree
from outpace.drafting.tree_builder import TreeBuilder
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class Child(NamedTuple):
    """A likely token after ``node`` of ``_drafted``, which is ``at`` in ``_tree``, and its probability there."""

    node: int
    at: int
    token: int
    prob: float


class SampledTreeBuilder(TreeBuilder):
    """A tree that grows level by level; ``branching[d]`` draws after each node at depth d, 1 beyond its end.

    At temperature 0, and for ``deterministic`` builders always, they are that many of the likeliest tokens.
    """

    replacement = True
    deterministic = False
    asks_policy = True

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance, branching: tuple[int, ...] = ()) -> None:
        super().__init__(sequence, budget, chance)
        self.branching = branching
        self._tree = TokenTree(replacement=self.replacement)
        self._frontier: list[tuple[int, int]] = [(ROOT, ROOT)]
        """Nodes that were just run, as (node of ``_drafted``, node of ``_tree``)."""

    def proposal(self) -> TokenTree:
        return self._tree

    def grow(self, logits: Tensor) -> bool:
        distribution = self._distribution(logits)
        self._depth += 1
        if self.deterministic or self.sequence.params.greedy:
            born = self._likeliest(distribution)
        else:
            distribution.ensure([node for node, _ in self._frontier])  # one vectorised pass
            born = self._level(distribution)
        if not born or not self.budget.runs(self._depth + 1):
            return False
        self._frontier = [(self._run_after(node, self._tree.tokens[child]), child) for node, child in born]
        return True

    @property
    def _width(self) -> int:
        """Draws after each node of this level."""
        return self.branching[self._depth - 1] if self._depth <= len(self.branching) else 1

    def _may_draw(self, width: int, confidence: float) -> bool:
        # Counted in draws: with replacement the number of nodes would depend on the draws' luck.
        room = len(self._tree.draws) + width <= self.budget.max_nodes
        return room and self.budget.wants(self._depth, confidence)

    def _level(self, distribution: TreeDistribution) -> list[tuple[int, int]]:
        """Draw one level; returns (parent in ``_drafted``, new node in ``_tree``), each node once."""
        width = self._width
        born: dict[int, int] = {}
        for node, at in self._frontier:
            if distribution.dead_end(node):
                continue
            p = distribution.at(node)
            if self._may_draw(width, p.highest()) and self._policy_level(distribution, node, at, width):
                for child in self._sample(at, p, width):
                    born.setdefault(child, node)
        return [(node, child) for child, node in born.items()]

    @abstractmethod
    def _sample(self, at: int, p: TokenDistribution, width: int) -> list[int]:
        """Add ``width`` draws after node ``at`` from the draft distribution ``p``; returns their nodes."""

    def _likeliest(self, distribution: TreeDistribution) -> list[tuple[int, int]]:
        """Add one level of likely tokens; returns as :meth:`_level` does."""
        width = self._width
        born = []
        for children in self._children(distribution, width):
            first = children[0]
            if self._may_draw(width, first.prob) and self._policy_level(distribution, first.node, first.at, width):
                born += self._add(children)
        return born

    def _policy_level(self, distribution: TreeDistribution, node: int, at: int, width: int) -> bool:
        above = ROOT if at == ROOT else self._tree.parents[at]
        return self._policy_draws(distribution, node, at, above, self._depth, width)

    def _add(self, children: Iterable[Child]) -> list[tuple[int, int]]:
        return [
            (one.node, self._tree.add(one.at, one.token, path_acceptance_prob=self._path_prob(one))) for one in children
        ]

    def _children(self, distribution: TreeDistribution, width: int) -> list[list[Child]]:
        """For every node of the frontier after which something can follow, its ``width`` likeliest, best first."""
        from outpace.targets.top import top_and_totals

        rows = self._ranking(distribution, [node for node, _ in self._frontier])
        found = []
        for (node, at), (values, tokens, total) in zip(self._frontier, top_and_totals(rows, width), strict=True):
            children = [
                Child(node, at, token, math.exp(min(0.0, value - total)))
                for token, value in zip(tokens, values, strict=True)
                if value > -math.inf
            ]
            if children:
                found.append(children)
        return found

    def _path_prob(self, one: Child) -> float:
        return one.prob * (1.0 if one.at == ROOT else self._tree.path_acceptance_probs[one.at])


class WithReplacement(SampledTreeBuilder):
    """Independent draws (SpecInfer, Miao et al. 2024, arXiv 2305.09781)."""

    def _sample(self, at: int, p: TokenDistribution, width: int) -> list[int]:
        first = self._tree.add(at, self.chance.categorical(p), QRow(p))
        row = len(self._tree.q_rows) - 1
        return [first, *(self._tree.add(at, self.chance.categorical(p), row) for _ in range(width - 1))]


class WithoutReplacement(SampledTreeBuilder):
    """Gumbel-top-k draws: RSD with constant branching (Jeon et al. 2024, arXiv 2402.14160, section 3.2)."""

    replacement = False

    def _sample(self, at: int, p: TokenDistribution, width: int) -> list[int]:
        tokens = self.chance.ordered_sample(p, width)
        first = self._tree.add(at, tokens[0], QRow(p))
        row = len(self._tree.q_rows) - 1
        return [first, *(self._tree.add(at, token, row) for token in tokens[1:])]


class GreedyPlusOne(SampledTreeBuilder):
    """The ``width - 1`` likeliest tokens, deterministic, and one sampled from the rest (Hu et al. 2025, arXiv
    2502.18779): for these sets the optimal acceptance has a closed form (see rule ``univer``)."""

    def _sample(self, at: int, p: TokenDistribution, width: int) -> list[int]:
        likeliest = p.dense().topk(min(width - 1, p.size)).indices.tolist() if width > 1 else []
        known = [token for token in likeliest if p[token] > 0.0]
        nodes = [self._tree.add(at, token) for token in known]
        rest, total = p.residual(None, known)
        if total > 0.0:
            nodes.append(self._tree.add(at, self.chance.categorical(rest), QRow(rest)))
        return nodes


class TopK(SampledTreeBuilder):
    """The likeliest children of every node, deterministic at every temperature (SpecInfer, Miao et al. 2024, section 3,
    expansion-based construction)."""

    deterministic = True

    def _sample(self, at: int, p: TokenDistribution, width: int) -> list[int]:
        raise NotImplementedError("the likeliest tokens are not drawn")


class StochasticBeam(SampledTreeBuilder):
    """Sequences drawn without replacement by stochastic beam search (Kool et al. 2019, arXiv 1903.06059; RSD-S in
    Jeon et al. 2024, section 3.3). ``branching[0]`` is the beam.

    Siblings stand in the order of their perturbed log-probabilities. Whether a node gets another child depends on those
    values, which are independent of which token the next child would be, so draws remain draws without replacement.
    """

    replacement = False
    asks_policy = False

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance, branching: tuple[int, ...] = ()) -> None:
        super().__init__(sequence, budget, chance, branching)
        self._scores: dict[int, tuple[float, float]] = {ROOT: (0.0, 0.0)}
        """Log-probability of the path and its perturbed value, by node of ``_tree``."""

    def _level(self, distribution: TreeDistribution) -> list[tuple[int, int]]:
        import torch

        beam = self.branching[0]
        if len(self._tree.draws) + beam > self.budget.max_nodes:
            return []
        rows, logs, values = [], [], []
        alive = [(node, at) for node, at in self._frontier if not distribution.dead_end(node)]
        for node, at in alive:
            p = distribution.p(node)
            log_q, perturbed = self._scores[at]
            paths = p.double().log() + log_q
            rows.append(p)
            logs.append(paths)
            values.append(_conditioned(paths + self.chance.gumbel(len(p)).to(paths.device), perturbed))
        if not alive:
            return []
        flat = torch.stack(values).flatten()
        best = [i for i in flat.topk(min(beam, len(flat))).indices.tolist() if float(flat[i]) > -torch.inf]
        held: dict[int, int] = {}
        born = []
        for index in best:
            which, token = divmod(index, self._sampler_vocab)
            node, at = alive[which]
            child = self._tree.add(at, token, held.get(which, QRow(rows[which])))
            held.setdefault(which, len(self._tree.q_rows) - 1)
            self._scores[child] = (float(logs[which][token]), float(flat[index]))
            born.append((node, child))
        return born

    def _likeliest(self, distribution: TreeDistribution) -> list[tuple[int, int]]:
        """Beam search: of all continuations of the beam the ``branching[0]`` likeliest."""
        beam = self.branching[0]
        if len(self._tree.draws) + beam > self.budget.max_nodes:
            return []
        found = [child for children in self._children(distribution, beam) for child in children]
        return self._add(sorted(found, key=self._path_prob, reverse=True)[:beam])

    @property
    def _sampler_vocab(self) -> int:
        return self.sequence.sampler.vocab_size

    def _sample(self, at: int, p: TokenDistribution, width: int) -> list[int]:
        raise NotImplementedError("beams are drawn a level at a time")


class SampledTree(CandidateTree):
    """Lets ``builder`` draw over the target's vocabulary from logits that others run.

    ``ids`` (Vd,): the target's id of each column of the logits; other tokens of the ``vocab_size`` have probability
    zero, before the request's own processors.
    """

    def __init__(self, builder: TreeBuilder, ids: Tensor, vocab_size: int) -> None:
        self._builder, self._ids, self._vocab_size = builder, ids, vocab_size
        self._logits: Tensor | None = None

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        import torch

        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf, dtype=torch.float32)
        whole[:, self._ids.to(logits.device)] = logits.float()
        self._logits = whole if self._logits is None else torch.cat([self._logits, whole])
        run = self._builder.run
        before = len(run)
        if not self._builder.grow(self._logits):
            return []
        return [(run.parents[node] + 1, run.tokens[node]) for node in range(before, len(run))]

    def tree(self) -> TokenTree:
        return self._builder.proposal()


def _conditioned(perturbed: Tensor, maximum: float) -> Tensor:
    """Gumbel-perturbed values, (V,), given that the largest of them is ``maximum`` (Kool et al. 2019, appendix B.3)."""
    import torch

    v = maximum - perturbed + torch.log1p(-(perturbed - perturbed.max()).exp())
    out = maximum - v.clamp(min=0.0) - torch.log1p((-v.abs()).exp())
    # The largest itself has v = -inf and lands on the maximum; tokens without probability stay out.
    return torch.where(torch.isneginf(perturbed), perturbed, out)

"""Verification from the leaves up: block verification of chains and traversal verification of trees.

Testing token by token throws away a prefix as soon as one token fails. Block verification (Sun et al. 2024, arXiv
2403.10444, algorithm 2) tests whole prefixes, longest first; its accepted length is at least that of standard
rejection, and optimal for a chain. Traversal verification (Weng et al. 2025, arXiv 2505.12398) does the same on trees:
leaves before their parents, siblings in the order in which they were drawn.

A node v carries the probability ``mass`` with which the output is to pass through it, given what was drawn down to
it. A child x ~ q gets min(1, mass * p(x) / q(x)). When the child's whole subtree has been rejected, v is left with
residual norm(max(0, mass * p - q)) and mass s / (s + 1 - mass), where s is the residual's sum before it is normalised.
A node whose children are all gone is accepted with its mass, and the next token comes from its residual.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.acceptance.base import TreeByTree, Verdict
from outpace.acceptance.draws import drawn_from, draws_by_parent, left_by, open_ahead
from outpace.core.chance import Chance
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import ROOT, Draw, TokenTree
from outpace.targets.base import TreeScores


class Traversal(TreeByTree):
    """Bottom-up verification of trees. Lossless; accepts at least as much as recursive rejection on average."""

    name = "traversal"
    paper = "Weng et al. 2025, arXiv 2505.12398"
    lossless = True
    takes_without_replacement = True

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        tree = scores.tree
        draws_at = draws_by_parent(tree)
        open_ahead(scores, draws_at)
        stack = [_Visit(scores, ROOT, 1.0)]
        while True:
            here = stack[-1]
            draws = draws_at.get(here.node, ())
            if here.tried < len(draws):
                mass = here.offer(tree, draws)
                if mass > 0.0:  # a child without mass cannot be passed through, nor can anything below it
                    child = draws[here.tried - 1].node
                    stack.append(_Visit(scores, child, mass))
                else:
                    here.reject()
            elif here.node == ROOT or chance.bernoulli_at_most(here.most, here.mass):
                return Verdict(tuple(tree.path(here.node)), chance.categorical(here.p))
            else:
                stack.pop()
                stack[-1].reject()


class _Visit:
    """A node under verification: the mass and the target distribution that its rejected draws have left.

    What a rejected draw leaves is computed when it is read, and most of it never is: deep in a draft masses are small,
    and rejecting takes away from them.
    """

    __slots__ = ("_draw", "_mass", "_p", "_q", "_rejected", "_scores", "node", "tried")

    def __init__(self, scores: TreeScores, node: int, mass: float) -> None:
        self._scores, self._mass, self.node = scores, mass, node
        self._p: TokenDistribution | None = None
        self._rejected = False
        self.tried = 0

    @property
    def p(self) -> TokenDistribution:
        """What is left of the target's distribution; leaves that are rejected are never asked."""
        if self._p is None:
            self._p = self._scores.distribution.at(self.node)
        if self._rejected:
            self._rejected = False
            # Where nothing of the target is left, the draw had all of it: its rejection had probability zero.
            self._p, total = left_by(self._p, self._q, self._draw.token, self._mass)
            if self._mass < 1.0:
                self._mass = total / (total + 1.0 - self._mass)
        return self._p

    def mass(self) -> float:
        """The mass that is left."""
        if self._rejected:
            _ = self.p
        return self._mass

    @property
    def most(self) -> float:
        """A bound of :meth:`mass`, which rounding does not exceed, without what the last rejection took."""
        return self._mass * (1.0 + 1e-6)

    def offer(self, tree: TokenTree, draws: Seq[Draw]) -> float:
        """The mass that the next draw gets."""
        p, self._draw = self.p, draws[self.tried]
        self._q = drawn_from(tree, draws[: self.tried], self._draw, p)
        self.tried += 1
        return p.acceptance(self._q, self._draw.token, self._mass)

    def reject(self) -> None:
        """The draw that was offered last, and all below it, has been rejected."""
        self._rejected = True

"""UniVer: tree verification as optimal transport at every level, conditional on the prefix (Weng, Hu, Yairi 2026).

arXiv 2605.04543. A node v passes a share ``mass`` of the output (see :mod:`outpace.acceptance.traversal`). Its children
S are what was drawn after it; a transport plan moves the target mass * p(x) onto the sets S that hold x, no set giving
more than one. The plan scales with the prefix's mass, so that vertical acceptance guides horizontal selection, and the
levels compose: children are decided in post-order, each with its share of what its rejected siblings left; when all
are gone v keeps the output with h = (mass - E[A]) / (1 - E[A]), E[A] being the mean mass that plans give to children,
and the next token comes from what the plan could not move.

The plan here is the optimal one, in closed form, for the sets of "greedy" drafting (Hu et al. 2025, arXiv 2502.18779):
deterministic draft tokens D and at most one sampled token x ~ q. Off D, min(mass * p(x), q(x)) moves to x itself; the
supply that is left, L = 1 - sum over x not in D of min(mass * p(x), q(x)), covers all of D's demand, so each t in D
gets the share mass * p(t) / L of it. With D empty this is block verification; without a sampled token, recursive
rejection. Nodes with several sampled draws have no closed form: such trees are for ``traversal``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.acceptance.base import TreeByTree, Verdict
from outpace.acceptance.draws import drawn_from, draws_by_parent, open_ahead
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import DETERMINISTIC, ROOT, Draw
from outpace.targets.base import TreeScores


class UniVer(TreeByTree):
    """Conditional optimal transport over the levels of a tree with at most one sampled draw a node. Lossless."""

    name = "univer"
    paper = "Weng, Hu, Yairi 2026, arXiv 2605.04543"
    lossless = True

    def check(self, drafter_name: str, proposal: Proposal) -> None:
        super().check(drafter_name, proposal)
        if proposal.tree and proposal.sampled and not proposal.one_sampled_sibling:
            raise BadInput(
                f"rule '{self.name}' takes at most one sampled draft token among deterministic siblings, but "
                f"'{drafter_name}' drafts {proposal}; use rule 'traversal'"
            )

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        draws_at = draws_by_parent(scores.tree)
        open_ahead(scores, draws_at)
        stack = [_Plan(scores, ROOT, 1.0, draws_at.get(ROOT, ()))]
        while True:
            here = stack[-1]
            if here.shares:
                child, share = here.shares.pop(0)
                given = share / here.left if here.left > share else 1.0
                here.left -= share
                stack.append(_Plan(scores, child, given, draws_at.get(child, ())))
            elif here.node == ROOT or chance.bernoulli_at_most(here.most, here.stop):
                return Verdict(tuple(scores.tree.path(here.node)), chance.categorical(here.rest))
            else:
                stack.pop()


class _Plan:
    """The transport plan at one node: shares of its children, then the node's own ``stop`` and ``rest``."""

    __slots__ = ("_demand", "_known", "_mass", "_q", "_rest", "_scores", "_supply", "_total", "left", "node", "shares")

    def __init__(self, scores: TreeScores, node: int, mass: float, draws: Seq[Draw]) -> None:
        self._scores, self.node, self._mass = scores, node, mass
        self.left = 1.0
        """Probability that none of the children decided so far was passed through."""
        self.shares: list[tuple[int, float]] = []
        self._known: list[int] = []
        """Deterministic children's tokens, D."""
        self._q: TokenDistribution | None = None
        self._demand, self._supply, self._total = 0.0, 1.0, mass
        """Mass of the target on D; the supply that is left off D; mass off D that the sampled token does not take."""
        self._rest: TokenDistribution | None = None
        if draws:
            self._share_out(draws)

    def _share_out(self, draws: Seq[Draw]) -> None:
        """Shares of the children."""
        p, mass = self._scores.distribution.at(self.node), self._mass
        known = {draw.token: draw.node for draw in draws if draw.q_row == DETERMINISTIC}
        sampled = [draw for draw in draws if draw.q_row != DETERMINISTIC]
        if len(sampled) > 1:
            raise BadInput("rule 'univer' takes at most one sampled draft token after each node")
        self._known = list(known)
        demand = {token: mass * p[token] for token in known}
        self._demand = sum(demand.values())
        own = 0.0
        if sampled:
            draw = sampled[0]
            self._q = drawn_from(self._scores.tree, (), draw, p)
            if draw.token not in known:
                own = p.acceptance(self._q, draw.token, mass)
                self.shares.append((draw.node, own))
            if known:
                self._settle()
        scale = (1.0 - own) / self._supply if self._supply > 0.0 else 0.0
        self.shares += [(known[token], scale * share) for token, share in demand.items()]
        self.shares = [(child, min(1.0, share)) for child, share in self.shares if share > 0.0]

    def _settle(self) -> None:
        """Off D, what q does not take: max(0, mass * p - q). The sampled token takes the rest of the demand there."""
        p = self._scores.distribution.at(self.node)
        self._rest, self._total = p.residual(self._q, self._known, self._mass)
        if self._q is not None:
            self._supply -= max(0.0, self._mass - self._demand - self._total)

    @property
    def rest(self) -> TokenDistribution:
        """What the next token comes from if the output ends here."""
        if self._rest is None:
            self._settle()
        assert self._rest is not None
        return self._rest

    @property
    def most(self) -> float:
        """A bound of :meth:`stop`, which rounding does not exceed."""
        return 1.0 if self._known else self._mass * (1.0 + 1e-6)

    def stop(self) -> float:
        """Probability that it does, all children being gone."""
        if self._rest is None and (self._known or self._q is not None):
            self._settle()
        unmoved = max(0.0, self._supply - self._demand)  # 1 - E[A]
        return min(1.0, self._total / unmoved) if unmoved > 0.0 else 0.0

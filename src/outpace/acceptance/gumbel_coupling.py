"""Couplings: redraw a token from a new distribution so that it stays what it was as often as may be.

Given x ~ q, :func:`maximal_redraw` returns y ~ p with P(y = x) = sum_x min(p, q), the largest possible;
:func:`gumbel_redraw` returns y ~ p by the Gumbel-max trick with the noise that x came from (Daliri et al. 2024, arXiv
2408.07978), which needs no look at q's residual and keeps P(y = x) >= (1 - TV) / (1 + TV). Speculative Jacobi decoding
with coupled redraws (``mcsjd``) rests on them. :class:`GumbelCoupling` is the acceptance rule that follows: the
target's own token under the noise of the draft token; accept while they agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.acceptance.base import TreeByTree, Verdict
from outpace.acceptance.draws import draws_by_parent, proposal_distribution
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT
from outpace.targets.base import TreeScores

if TYPE_CHECKING:
    from outpace.core.proposal import Proposal
from outpace.acceptance.couplings import gumbel_redraw


class GumbelCoupling(TreeByTree):
    """Accept a sampled chain while the target's token under the draft token's own noise is that token. Lossless.

    Accepts less than ``rejection`` (at most maximal coupling), but the token it puts out at a position depends on the
    noise and on p alone: drafts that change from round to round stay stable.
    """

    name = "gumbel-coupling"
    paper = "Daliri et al. 2024, arXiv 2408.07978"
    lossless = True
    takes_trees = False

    def check(self, drafter_name: str, proposal: Proposal) -> None:
        super().check(drafter_name, proposal)
        if not proposal.sampled:
            raise BadInput(
                f"rule '{self.name}' needs sampled draft tokens with their q, but '{drafter_name}' drafts {proposal}; "
                "use rule 'rejection'"
            )

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        draws_at = draws_by_parent(scores.tree)
        path: list[int] = []
        node = ROOT
        while True:
            p = scores.p(node)
            draws = draws_at.get(node, ())
            if not draws:
                return Verdict(tuple(path), chance.categorical(p))
            q = proposal_distribution(scores.tree, (), draws[0], p)
            if q is None:
                raise BadInput("rule 'gumbel-coupling' needs the q row of every draft token")
            token = gumbel_redraw(p, q, draws[0].token, chance)
            if token != draws[0].token:
                return Verdict(tuple(path), token)
            path.append(draws[0].node)
            node = draws[0].node

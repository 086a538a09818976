"""Gumbel coupling (Daliri et al. 2024, arXiv 2408.07978): the target's own token under the noise of the draft token."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from outpace.acceptance.base import TopDown
from outpace.acceptance.couplings import gumbel_redraw
from outpace.acceptance.draws import proposal_distribution
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.tree import Draw, TokenTree


class GumbelCoupling(TopDown):
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

    def choose(self, tree: TokenTree, draws: Seq[Draw], p: Tensor, chance: Chance) -> Draw | int:
        q = proposal_distribution(tree, (), draws[0], p)
        if q is None:
            raise BadInput("rule 'gumbel-coupling' needs the q row of every draft token")
        token = gumbel_redraw(p, q, draws[0].token, chance)
        return draws[0] if token == draws[0].token else token

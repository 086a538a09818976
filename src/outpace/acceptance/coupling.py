"""Couplings: redraw a token from a new distribution so that it stays what it was as often as may be.

Given x ~ q, :func:`maximal_redraw` returns y ~ p with P(y = x) = sum_x min(p, q), the largest possible;
:func:`gumbel_redraw` returns y ~ p by the Gumbel-max trick with the noise that x came from (Daliri et al. 2024, arXiv
2408.07978), which needs no look at q's residual and keeps P(y = x) >= (1 - TV) / (1 + TV). Speculative Jacobi decoding
with coupled redraws (``mcsjd``) rests on them. :class:`GumbelCoupling` is the acceptance rule that follows: the
target's own token under the noise of the draft token; accept while they agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outpace.acceptance.base import TreeByTree, Verdict
from outpace.acceptance.draws import acceptance_probability, draws_by_parent, law, leftover
from outpace.chance import Chance
from outpace.errors import BadInput
from outpace.targets.base import TreeScores
from outpace.tree import ROOT

if TYPE_CHECKING:
    from outpace.drafters.base import Proposal


def maximal_redraw(p: Tensor, q: Tensor, token: int, chance: Chance) -> int:
    """y ~ ``p``, maximally coupled with ``token`` ~ ``q``; both (V,)."""
    if chance.bernoulli(acceptance_probability(p, q, token)):
        return token
    rest, total = leftover(p, q, token)
    return chance.categorical(rest if total > 0.0 else p)


def gumbel_redraw(p: Tensor, q: Tensor, token: int, chance: Chance) -> int:
    """y = argmax(log ``p`` + G), G being Gumbel noise under which ``token`` = argmax(log ``q`` + G)."""
    return int((p.double().log() + _noise_behind(q, token, chance)).argmax())


def _noise_behind(q: Tensor, token: int, chance: Chance) -> Tensor:
    """Gumbel noise given that ``token`` won under ``q``: its perturbed log-probability is the maximum, the others'
    are truncated below it (Maddison et al. 2014, arXiv 1411.0030); tokens without probability are free."""
    fresh = chance.gumbel(len(q)).to(q.device)
    log_q = q.double().log()
    best = float(fresh[token])  # max of log q + G is a standard Gumbel, whatever won
    perturbed = log_q + fresh
    truncated = -torch.logaddexp(-perturbed, torch.full_like(perturbed, -best))
    noise = torch.where(q > 0, truncated - log_q, fresh)
    noise[token] = best - float(log_q[token])
    return noise


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
            q = law(scores.tree, (), draws[0], p)
            if q is None:
                raise BadInput("rule 'gumbel-coupling' needs the q row of every draft token")
            token = gumbel_redraw(p, q, draws[0].token, chance)
            if token != draws[0].token:
                return Verdict(tuple(path), token)
            path.append(draws[0].node)
            node = draws[0].node

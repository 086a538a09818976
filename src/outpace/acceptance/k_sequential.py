"""SpecTr's k-sequential selection (Sun et al. 2023, arXiv 2310.15141, algorithm 3): k independent draws of one row.

Each of the k draws is accepted with min(1, p(x) / (rho q(x))). rho in [1, k] solves 1 - (1 - beta)^k = rho beta with
beta = sum_x min(q(x), p(x) / rho), which makes the selection exact; when all are rejected the token comes from
norm(max(0, p - rho q)). For k = 1, rho = 1: standard rejection. Its acceptance is within (1 - 1/e) of the optimal
transport's. Applied level by level, it takes trees whose siblings are independent draws of one row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from outpace.acceptance.base import TopDown
from outpace.acceptance.draws import acceptance_probability, proposal_distribution
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import DETERMINISTIC, Draw, TokenTree

if TYPE_CHECKING:
    from torch import Tensor


def division_factor(p: Tensor, q: Tensor, k: int) -> float:
    """rho of k-sequential selection for ``k`` draws of ``q`` against ``p``, by bisection to float precision."""
    import numpy as np

    if k == 1:
        return 1.0
    support = q > 0.0
    drafted, wanted = q[support].double().cpu().numpy(), p[support].double().cpu().numpy()

    def excess(rho: float) -> float:
        beta = float(np.minimum(drafted, wanted / rho).sum())
        return 1.0 - (1.0 - beta) ** k - rho * beta

    low, high = 1.0, float(k)  # the excess falls in rho: >= 0 at 1, <= 0 at k
    while high - low > 1e-12:
        middle = 0.5 * (low + high)
        if excess(middle) > 0.0:
            low = middle
        else:
            high = middle
    return high  # at or above the root the selection is exact; below it the residual would be negative


class KSequential(TopDown):
    """k-SEQ selection down a tree of independent draws. Lossless."""

    name = "k-seq"
    aliases = ("spectr",)
    paper = "Sun et al. 2023, arXiv 2310.15141"
    lossless = True

    def check(self, drafter_name: str, proposal: Proposal) -> None:
        super().check(drafter_name, proposal)
        if not proposal.sampled or proposal.one_sampled_sibling or proposal.mixed:
            raise BadInput(
                f"rule '{self.name}' needs independent draws with their q, but '{drafter_name}' drafts {proposal}; "
                "use rule 'recursive-rejection'"
            )

    def choose(self, tree: TokenTree, draws: Seq[Draw], p: TokenDistribution, chance: Chance) -> Draw | int:
        return self.select(tree, draws, p.dense(), chance)

    def select(self, tree: TokenTree, draws: Seq[Draw], p: Tensor, chance: Chance) -> Draw | int:
        """:meth:`choose` with all of p, (V,)."""
        import torch

        if len({draw.q_row for draw in draws}) > 1 or draws[0].q_row == DETERMINISTIC:
            raise BadInput("rule 'k-seq' takes siblings that were drawn independently from one q row")
        q = proposal_distribution(tree, (), draws[0], p)
        assert q is not None
        rho = division_factor(p, q, len(draws))
        for draw in draws:
            if chance.bernoulli(acceptance_probability(p, q, draw.token, 1.0 / rho)):
                return draw
        beta = float(torch.minimum(q, p / rho).sum(dtype=torch.float64))
        taken = (1.0 - (1.0 - beta) ** len(draws)) / beta if beta > 0.0 else 0.0
        rest = (p - taken * torch.minimum(q, p / rho)).clamp_(min=0.0)
        return chance.categorical(rest if float(rest.sum()) > 0.0 else p)

"""Rejection sampling with the true q, for chains and recursively for trees.

One draft token x ~ q is accepted with probability min(1, p(x) / q(x)); after a rejection the next token comes from
the residual norm(max(0, p - q)) (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv
2302.01318, algorithm 2). With several draws after one node, each is tried in turn against the residual that the
earlier ones left: with replacement in SpecInfer (Miao et al. 2024, arXiv 2305.09781, algorithm 2), without in RSD
(Jeon et al. 2024, arXiv 2402.14160, algorithm 1) and in multi-candidate decoding (Yang et al. 2024, arXiv 2401.06706),
where each draw is tested with its conditional distribution given the earlier ones. A deterministic draft token is a
draw from a one-hot q: it is accepted with probability p(x), and its residual is p without x.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.acceptance.base import TopDown
from outpace.acceptance.draws import drawn_from, left_by
from outpace.core.chance import Chance
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import Draw, TokenTree


class RecursiveRejection(TopDown):
    """Multi-draft rejection down the tree; on a chain it is standard rejection sampling. Lossless.

    Siblings are independent draws, or drawn without replacement, or deterministic, in any mixture.
    """

    name = "recursive-rejection"
    aliases: tuple[str, ...] = ("specinfer", "rsd", "multi-candidate")
    paper = "Miao et al. 2024, arXiv 2305.09781; Jeon et al. 2024, arXiv 2402.14160"
    lossless = True
    takes_without_replacement = True
    takes_unverified_draws = True

    def choose(self, tree: TokenTree, draws: Seq[Draw], p: TokenDistribution, chance: Chance) -> Draw | int:
        for index, draw in enumerate(draws):
            q = drawn_from(tree, draws[:index], draw, p)
            if chance.bernoulli(p.acceptance(q, draw.token)):
                return draw
            p, _ = left_by(p, q, draw.token)
        return chance.categorical(p)


class Rejection(RecursiveRejection):
    """Speculative sampling of a chain with its true q (Leviathan et al. 2023; Chen et al. 2023). Lossless."""

    name = "rejection"
    aliases: tuple[str, ...] = ("leviathan", "sps")
    paper = "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318"
    takes_trees = False

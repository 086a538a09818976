"""Rejection sampling with the true q, for chains and recursively for trees.

One draft token x ~ q is accepted with probability min(1, p(x) / q(x)); after a rejection the next token comes from
the residual norm(max(0, p - q)) (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv
2302.01318, algorithm 2). With several draws after one node, each is tried in turn against the residual that the
earlier ones left (SpecInfer, Miao et al. 2024, arXiv 2305.09781, algorithm 2). A deterministic draft token is a draw
from a one-hot q: it is accepted with probability p(x), and its residual is p without x.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from outpace.acceptance.base import AcceptanceRule, Verdict
from outpace.chance import Chance
from outpace.targets.base import TreeScores
from outpace.tree import DETERMINISTIC, ROOT, Draw, TokenTree


def residual(p: Tensor, tree: TokenTree, draw: Draw) -> Tensor | None:
    """norm(max(0, p - q)) after ``draw`` was rejected, (V,); None when nothing is left (p equals q to rounding)."""
    if draw.q_row == DETERMINISTIC:
        rest = p.clone()
        rest[draw.token] = 0.0
    else:
        rest = (p - tree.q_rows[draw.q_row].dense(len(p)).to(p.device)).clamp_(min=0.0)
    total = rest.sum()
    return rest / total if float(total) > 0.0 else None


def acceptance_probability(p: Tensor, tree: TokenTree, draw: Draw) -> float:
    """min(1, p(x) / q(x)) of one draw against the distribution ``p``."""
    p_token = float(p[draw.token])
    if draw.q_row == DETERMINISTIC:
        return p_token
    q_token = tree.q_rows[draw.q_row].prob(draw.token)
    return 1.0 if p_token >= q_token else p_token / q_token


class RecursiveRejection(AcceptanceRule):
    """Multi-draft rejection down the tree (SpecInfer); on a chain it is standard rejection sampling. Lossless.

    Siblings must be independent draws from their rows, or carry each the conditional row given the earlier ones.
    """

    name = "recursive-rejection"
    paper = "Miao et al. 2024, arXiv 2305.09781"
    lossless = True

    def accept(self, scores: Seq[TreeScores], states: Seq[Any], chances: Seq[Chance]) -> list[Verdict]:
        return [self._walk(one, chance) for one, chance in zip(scores, chances, strict=True)]

    @staticmethod
    def _walk(scores: TreeScores, chance: Chance) -> Verdict:
        tree = scores.tree
        draws_at: dict[int, list[Draw]] = defaultdict(list)
        for draw in tree.draws:
            draws_at[draw.parent].append(draw)
        path: list[int] = []
        node = ROOT
        while True:
            p = scores.p(node)
            accepted = None
            for draw in draws_at.get(node, ()):
                if chance.bernoulli(acceptance_probability(p, tree, draw)):
                    accepted = draw
                    break
                rest = residual(p, tree, draw)
                if rest is None:  # p == q up to rounding: a rejection had probability zero, so keep p
                    continue
                p = rest
            if accepted is None:
                return Verdict(tuple(path), chance.categorical(p))
            path.append(accepted.node)
            node = accepted.node


class Rejection(RecursiveRejection):
    """Speculative sampling of a chain with its true q (Leviathan et al. 2023; Chen et al. 2023). Lossless."""

    name = "rejection"
    paper = "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318"
    takes_trees = False

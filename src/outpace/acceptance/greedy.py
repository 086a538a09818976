"""Greedy acceptance: keep the draft tokens that are the target's own argmax (Stern et al. 2018, arXiv 1811.03115)."""

from __future__ import annotations

from outpace.acceptance.base import TreeByTree, Verdict
from outpace.core.chance import Chance
from outpace.core.tree import ROOT
from outpace.targets.base import TreeScores


class Greedy(TreeByTree):
    """Walk down the tree while a child holds the target's argmax. Lossless at temperature 0, chain or tree."""

    name = "greedy"
    paper = "Stern et al. 2018, arXiv 1811.03115"
    lossless = True
    greedy_only = True
    takes_without_replacement = True
    takes_unverified_draws = True

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            token = scores.argmax(node)
            child = scores.tree.child(node, token)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)
            node = child

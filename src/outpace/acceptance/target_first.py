"""Candidates from the target itself, the best continuation chosen (Lu et al. 2024, arXiv 2409.10644).

Improved multi-candidate decoding draws the candidates of the first level from the target instead of the drafter, and
keeps the one whose continuation is accepted furthest. Here ``candidates`` tokens are drawn from the target's
distribution at the root. Of those, the rule takes the one below which most draft tokens are expected to be accepted:
the sum, over the nodes below it, of the target probability of the path to them. Tokens that were not drafted count 0;
of equally good ones the first drafted is taken. Below the first level, every token is drawn from the target, and the
walk continues while a child holds it.

Choosing among the target's own draws is lossy: tokens with a good continuation become more probable. Promise: a set
of probability s under p has at least s^k and at most 1 - (1 - s)^k, k being ``candidates``; so the total variation at
the first level is at most k^(-1/(k-1)) - k^(-k/(k-1)), and 0 below it. With one candidate the rule is lossless. The
number of accepted tokens that the paper chooses by would bias the tokens below as well; its expected value does not.

Of the paper's other two parts, trees of any depth need no mask here, and learned early stops belong to controllers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.acceptance.bounds import TOTAL_VARIATION, Bound, NodeView
from outpace.acceptance.lossy import LossyRule
from outpace.core.chance import Chance
from outpace.core.tree import ROOT
from outpace.core.validation import StrictModel
from outpace.targets.base import TreeScores

if TYPE_CHECKING:
    from torch import Tensor


class TargetFirstSettings(StrictModel):
    """Settings of ``target-first``."""

    candidates: int = Field(2, ge=1, le=64, description="draws from the target at the first level; 1 is lossless")


class TargetFirst(LossyRule[TargetFirstSettings]):
    """Draws several first tokens from the target, and takes the one whose drafted continuation is accepted furthest."""

    name = "target-first"
    aliases = ("imcsd",)
    paper = "Lu et al. 2024, arXiv 2409.10644"
    Settings = TargetFirstSettings
    keeps_greedy = True
    by_node = "drafts"
    corners = ({}, {"candidates": 1}, {"candidates": 3}, {"candidates": 8})

    @property
    def bound(self) -> Bound:
        return Bound(TOTAL_VARIATION, "k^(-1/(k-1)) - k^(-k/(k-1)) with k = candidates, 0 for k = 1")

    @property
    def exact(self) -> bool:
        return self.settings.candidates == 1

    def limit(self, node: NodeView) -> float:
        k = self.settings.candidates
        return 0.0 if k == 1 else float(k ** (-1 / (k - 1)) - k ** (-k / (k - 1)))

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        path: list[int] = []
        node, token = ROOT, self._first(scores, chance)
        while (child := scores.tree.child(node, token)) is not None:
            path.append(child)
            node, token = child, chance.categorical(scores.distribution.at(child))
        return Verdict(tuple(path), token)

    def first_distribution(self, scores: TreeScores) -> Tensor:
        """The distribution of the token after the root, (V,) float64, given the draft; below the root it is p's."""
        import torch

        rest, left = scores.p(ROOT).double().clone(), 1.0
        found = torch.zeros_like(rest)
        for token in self._ordered(scores):
            share = float(rest[token] / rest.sum())
            found[token] = left * (1.0 - (1.0 - share) ** self.settings.candidates)
            left -= float(found[token])
            rest[token] = 0.0
            if float(rest.sum()) <= 0.0:
                return found
        return found + rest * (left / float(rest.sum()))

    def _ordered(self, scores: TreeScores) -> list[int]:
        """The draft tokens after the root, those with the best continuations first."""
        children = sorted(scores.tree.children(ROOT), key=lambda node: -self._expected(scores, node))
        return [scores.tree.tokens[child] for child in children]

    def _first(self, scores: TreeScores, chance: Chance) -> int:
        """The best of the draws. Better tokens are asked for first: whether any of the draws is one has the probability
        1 - (1 - p)^k, and where none is, all of them are draws from the rest."""
        p = scores.distribution.at(ROOT)
        for token in self._ordered(scores):
            if chance.bernoulli(1.0 - (1.0 - p[token]) ** self.settings.candidates):
                return token
            p, _ = p.residual(None, (token,))
        return chance.categorical(p)

    @staticmethod
    def _expected(scores: TreeScores, child: int) -> float:
        """How many draft tokens are expected to be accepted if ``child`` is, itself included."""
        tree, found, reached = scores.tree, 1.0, [(child, 1.0)]
        while reached:
            node, probability = reached.pop()
            if children := tree.children(node):
                p = scores.distribution.at(node)
                below = [(one, probability * p[tree.tokens[one]]) for one in children]
                found += sum(value for _, value in below)
                reached += [one for one in below if one[1] > 0.0]
        return found

"""Grouped verification (GSD: So et al. 2025, arXiv 2508.07747): groups of similarly probable tokens stand together.

The tokens are sorted by target probability and cut into groups of at most ``size`` neighbors in that order; a token
below ``ratio`` times the first of its group begins another one. A draft token x of group C is accepted with
probability min(1, p(C) / q(C)). After a rejection the group is drawn from the residual norm(max(0, p - q)) of the
groups, and the token from p within the group. So groups have exactly their probability under p, and only the choice
within a group follows the drafter. Groups are a function of p alone; the paper centers a group of fixed size on the
drafted token.

Promise: within a group at worst its least probable token is chosen, so the total variation is at most the sum of p(C)
- min over C of p, over all groups C. With size 1 the rule is recursive rejection.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from pydantic import Field

from outpace.acceptance.bounds import TOTAL_VARIATION, Bound, NodeView
from outpace.acceptance.draws import proposal_distribution
from outpace.acceptance.lossy import NodeByNode
from outpace.core.chance import Chance
from outpace.core.tree import Draw
from outpace.core.validation import StrictModel
from outpace.targets.base import TreeScores

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 256
"""Tokens that are grouped: the most probable ones. Each of the others is a group of its own."""


class GroupedSettings(StrictModel):
    """Settings of ``grouped``."""

    size: int = Field(3, ge=1, description="most tokens in a group; 1 is lossless")
    ratio: float = Field(
        0.3, ge=0, le=1, description="least probability in a group, as a share of the group's most probable token"
    )


class Grouped(NodeByNode[GroupedSettings]):
    """Verifies groups of similarly probable tokens, and leaves the choice within an accepted group to the drafter."""

    name = "grouped"
    aliases = ("gsd",)
    paper = "So et al. 2025, arXiv 2508.07747"
    Settings = GroupedSettings
    keeps_greedy = True
    corners = ({}, {"size": 1}, {"size": 2, "ratio": 0.0}, {"size": 100, "ratio": 0.0}, {"size": 3, "ratio": 0.8})

    @property
    def bound(self) -> Bound:
        return Bound(TOTAL_VARIATION, "sum over groups C of p(C) - min over C of p")

    @property
    def exact(self) -> bool:
        return self.settings.size == 1

    def limit(self, node: NodeView) -> float:
        groups = self.groups(node.probs)
        found = 0.0
        for number in set(groups.tolist()):
            inside = node.probs[(groups == number) & (node.probs > 0)]
            if len(inside) > 1:
                found += float(inside.sum() - inside.min())
        return found

    def groups(self, p: Tensor) -> Tensor:
        """The group of every token, (V,): numbers that are equal within a group, and nowhere else."""
        import torch

        best = p.topk(min(_MOST, len(p)))
        number, members, first, found = -1, 0, 0.0, []
        for value in best.values.tolist():
            if members in (0, self.settings.size) or value < self.settings.ratio * first or value <= 0.0:
                number, members, first = number + 1, 0, value
            found.append(number)
            members += 1
        groups = torch.arange(len(p), device=p.device) + number + 1
        groups[best.indices] = torch.tensor(found, device=p.device)
        return groups

    def choose(self, scores: TreeScores, node: int, draws: Seq[Draw], chance: Chance) -> Draw | int:
        p = scores.p(node).double()
        groups = self.groups(p)
        for index, draw in enumerate(draws):
            q = proposal_distribution(scores.tree, draws[:index], draw, p)
            inside = groups == groups[draw.token]
            p_group = float(p[inside].sum()) if float(p[draw.token]) > 0.0 else 0.0
            if chance.bernoulli(p_group if q is None else p_group / float(q[inside].sum())):
                return draw
            p = self._residual(p, q, groups, inside)
        return chance.categorical(p)

    @staticmethod
    def _residual(p: Tensor, q: Tensor | None, groups: Tensor, inside: Tensor) -> Tensor:
        """What a rejected draw leaves of ``p``: groups of norm(max(0, p - q)), the proportions of p within each."""
        if q is None:
            rest = p.masked_fill(inside, 0.0)
        else:
            size = int(groups.max()) + 1
            of_groups = p.new_zeros(size).index_add_(0, groups, p)
            left = (of_groups - p.new_zeros(size).index_add_(0, groups, q.to(p))).clamp_(min=0.0)
            rest = p * (left / of_groups.clamp(min=1e-300))[groups]
        total = float(rest.sum())
        return rest / total if total > 0.0 else p

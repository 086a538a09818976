"""Gated: the rule of methods in which a trained gate decides which draft tokens the target is not asked about.

The gate says of a draft token whether it stands; all others are judged exactly. It promises nothing about the
committed token's distribution, because what stands depends on the gate's weights. A token that the request's sampling
parameters exclude never stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from outpace.acceptance.forgiving import Outright, Stands
from outpace.core.tree import Draw
from outpace.core.validation import StrictModel
from outpace.targets.base import TreeScores

Passes = Callable[[TreeScores, int, Draw], bool]
"""Whether a gate lets a draw after a node stand."""


class Gated(Outright[StrictModel]):
    """Accepts what a gate lets pass; exact elsewhere. Belongs to one method, and has no name to choose it by.

    ``label``: the method and its threshold, as results name them. ``exact``: whether the gate is set to ask about every
    token, so that the output distribution is the target's. ``layers``: whose hidden states ``passes`` reads.
    """

    by_node = ""

    def __init__(self, label: str, passes: Passes, *, exact: bool, layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.name, self._label = label.partition("(")[0], label
        self._passes, self._exact = passes, exact
        self.aux_hidden_state_layers = () if exact else layers

    @property
    def described(self) -> str:
        return self._label

    @property
    def bound(self) -> None:
        return None

    @property
    def exact(self) -> bool:
        return self._exact

    def standing(self, scores: TreeScores, node: int) -> Stands:
        return lambda draw: self._passes(scores, node, draw) and _possible(scores, node, draw.token)


def _possible(scores: TreeScores, node: int, token: int) -> bool:
    if scores.sequence.params.greedy:
        return float(scores.distribution.processed([node])[0, token]) > -math.inf
    return scores.distribution.at(node)[token] > 0.0


def vouched(scores: TreeScores, node: int, draw: Draw) -> bool:
    """What stands where the drafter itself has asked the gate."""
    return draw.node in scores.tree.vouched

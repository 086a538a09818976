"""What a rule promises about the committed token, as data, and the divergences that promises are made in.

A promise is made at every node of a tree: there, the distribution ``h`` of the committed token, over the random
numbers of drafter and rule, is compared with the target's distribution ``p`` under the request's sampling parameters.
All measures are convex in ``h``. Therefore a promise that holds at every node also holds for the next token after any
committed tokens, whatever rounds have led there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.targets.base import TreeScores

TOTAL_VARIATION, KL, HALF_CHI_SQUARE = "total variation", "KL divergence", "half chi-square divergence"
EXCESS_NLL = "excess negative log-likelihood"
"""At temperature 0: log-probability of the target's most probable token minus that of the committed one, in nats, under
the model's distribution at temperature 1 (bias, penalties and processors applied)."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A promise: ``measure`` of (h, p) is at most ``limit``, a formula in the rule's settings and p.

    ``at_temperature_0``: the limit of :data:`EXCESS_NLL` in greedy requests; "0" where these are answered as in greedy
    decoding.
    """

    measure: str
    limit: str
    at_temperature_0: str = "0"

    def public(self) -> dict[str, str]:
        """The entry of ``outpace rules --json``."""
        return {"measure": self.measure, "limit": self.limit, "at_temperature_0": self.at_temperature_0}

    def __str__(self) -> str:
        return f"{self.measure} <= {self.limit}"


IDENTICAL = Bound(TOTAL_VARIATION, "0")
"""The promise of lossless rules."""


@dataclass(frozen=True)
class NodeView:
    """The target after a node, as lossy rules judge it.

    ``probs`` (V,): the request's distribution; at temperature 0 the model's at temperature 1. ``logits`` (V,): after
    bias, penalties and processors, before temperature. ``temperature``: that of ``probs``.
    """

    probs: Tensor
    logits: Tensor
    temperature: float = 1.0

    @cached_property
    def highest(self) -> float:
        """The largest probability."""
        return float(self.probs.max())

    @cached_property
    def entropy(self) -> float:
        """In nats."""
        import torch

        return float(torch.special.entr(self.probs.double()).sum())

    def nth(self, rank: int) -> float:
        """The probability of the ``rank``-th most probable token (from 1) of those that have one."""
        positive = self.probs[self.probs > 0]
        return float(positive.topk(min(rank, len(positive))).values[-1])


def view(scores: TreeScores, node: int) -> NodeView:
    """The target after ``node``."""
    params = scores.sequence.params
    if params.greedy:
        logits = scores.distribution.processed([node])[0]
        return NodeView(logits.softmax(-1), logits)
    return NodeView(scores.p(node), scores.distribution.processed([node])[0], params.temperature)


def total_variation(h: Tensor, p: Tensor) -> float:
    """Half the sum of absolute differences of distributions (V,)."""
    return 0.5 * float((h.double() - p.double()).abs().sum())


def kl_divergence(h: Tensor, p: Tensor) -> float:
    """Sum of h log(h / p) in nats, (V,); infinite where p is 0 and h is not."""
    h, p = h.double(), p.double()
    there = h > 0
    if bool((p[there] <= 0).any()):
        return math.inf
    return max(0.0, float((h[there] * (h[there] / p[there]).log()).sum()))


def half_chi_square(h: Tensor, p: Tensor) -> float:
    """Half the sum of (h - p)^2 / p, (V,): the second-order approximation of the KL divergence."""
    h, p = h.double(), p.double()
    there = p > 0
    if bool((h[~there] > 0).any()):
        return math.inf
    return 0.5 * float(((h[there] - p[there]) ** 2 / p[there]).sum())


MEASURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    TOTAL_VARIATION: total_variation,
    KL: kl_divergence,
    HALF_CHI_SQUARE: half_chi_square,
}
"""Divergences by name, each of (h, p)."""

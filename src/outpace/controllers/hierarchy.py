"""Which models to stack, and how many tokens each hands up: the hierarchy of least expected latency.

Hierarchical speculative decoding (Mohri et al. 2025, arXiv 2510.19705): a model's drafts come from a smaller one, whose
drafts come from a smaller one still. With an acceptance rate for every pair and independent acceptances, a round in
which model i scores K tokens of model j yields 1 + a + ... + a^K tokens, a = rates[i][j], and costs K tokens of the
stack under j and one forward of i over K + 1 rows. So the seconds per token of a stack follow from those of the stack
below it::

    F_i = (K F_j + c_i(K + 1)) / (1 + a + ... + a^K)        and F_j = c_j(1) for the lowest

F_i grows with F_j, so the best stack over i contains the best stack over j: a shortest path whose edges scale what
comes before them. Models ordered by cost are its topological order, and n models and K up to m take n^2 m steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.controllers.predictor import tokens_per_round
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from torch import Tensor

Cost = Callable[[int], float]
"""Seconds of one forward by its rows."""
Rates = Seq[Seq[float]]
"""``rates[i][j]``: how often model i accepts a token of model j, given that it accepted those before."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """``models`` from the target down; ``lengths[d]`` tokens go up to models[d]; ``seconds`` a token, expected."""

    models: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: float


def latency(costs: Seq[Cost], rates: Rates, models: Seq[int], lengths: Seq[int]) -> float:
    """Expected seconds per token of one hierarchy."""
    seconds = costs[models[-1]](1)
    for level in range(len(lengths) - 1, -1, -1):
        above, below = models[level], models[level + 1]
        seconds = _over(costs[above], seconds, rates[above][below], lengths[level])
    return seconds


def _over(cost: Cost, below: float, rate: float, length: int) -> float:
    """Seconds per token of a model that scores ``length`` tokens of a stack of ``below`` seconds per token."""
    return (length * below + cost(length + 1)) / tokens_per_round(rate, length)


def best_hierarchy(costs: Seq[Cost], rates: Rates, most: int = 16) -> Hierarchy:
    """The hierarchy over model 0, the target, of least latency; ``most`` tokens handed up at each level.

    A model drafts only for more expensive ones. The target alone, if no hierarchy is faster.
    """
    check_rates(rates, len(costs))
    best: dict[int, Hierarchy] = {}
    for above in sorted(range(len(costs)), key=lambda one: (costs[one](1), -one)):
        found = Hierarchy((above,), (), costs[above](1))
        for below, stack in best.items():
            for length in range(1, most + 1):
                seconds = _over(costs[above], stack.seconds, rates[above][below], length)
                if seconds < found.seconds:
                    found = Hierarchy((above, *stack.models), (length, *stack.lengths), seconds)
        best[above] = found
    return best[0]


def check_rates(rates: Rates, count: int) -> None:
    """Raise BadInput for what are no acceptance rates of ``count`` models."""
    if len(rates) != count or any(len(row) != count for row in rates):
        raise BadInput(f"acceptance rates must be {count} rows of {count}: the target, then the draft models")
    if any(not 0.0 <= rate <= 1.0 for row in rates for rate in row):
        raise BadInput("acceptance rates must lie in [0, 1]")


def measured_rates(models: Seq[Target], texts: Seq[Seq[int]], last: int = 32) -> list[list[float]]:
    """Acceptance rates over the ``last`` positions of each text at temperature 1: the mean of sum(min(p_i, p_j)).

    That is what rejection sampling accepts of model j's tokens under model i. The texts should be the target's own.
    """
    import torch

    with torch.inference_mode():
        rows = [torch.cat([_last_rows(model, text, last) for text in texts]) for model in models]
        return [[float(torch.minimum(one, other).sum(-1).mean().clamp(0.0, 1.0)) for other in rows] for one in rows]


def _last_rows(model: Target, text: Seq[int], last: int) -> Tensor:
    """Distributions at temperature 1 after each of the last positions of a text."""
    cut = max(1, len(text) - last)
    sequence: Sequence = model.sequence(text[:cut])
    model.prefill([sequence])
    scores = model.score([(sequence, TokenTree.chain(text[cut:]))])
    model.close(sequence.kv)
    return scores[0].logits.float().softmax(-1)

"""Resampling: which particles go on, and how often. Each scheme keeps particle i N * weight i times on average.

Multinomial: N independent draws. Systematic: one uniform number, N equidistant points on the weights laid end to end
(Kitagawa 1996). Residual: floor(N * weight) copies of each, and independent draws for what is left (Liu and Chen 1998).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from itertools import pairwise

from outpace.core.chance import Chance

Resampling = Callable[[Seq[float], Chance], list[int]]


def effective_sample_size(weights: Seq[float]) -> float:
    """(sum of w)^2 / sum of w^2, between 1 and the number of weights."""
    return sum(weights) ** 2 / sum(weight**2 for weight in weights)


def multinomial(weights: Seq[float], chance: Chance) -> list[int]:
    """Ancestors by independent draws."""
    return sorted(_independent(weights, len(weights), chance))


def systematic(weights: Seq[float], chance: Chance) -> list[int]:
    """Ancestors by equidistant points. The points' offset is drawn as the interval in which it lies: the ancestors are
    the same within each, so that all outcomes can be enumerated."""
    import torch

    count = len(weights)
    ends = _cumulative(weights)
    # The offset u of points (u + k) / N changes an ancestor where it crosses the fraction of N * end.
    cuts = sorted({0.0, 1.0, *((count * end) % 1.0 for end in ends[:-1])})
    lengths = torch.tensor([high - low for low, high in pairwise(cuts)], dtype=torch.float64)
    at = chance.categorical(lengths)
    offset = (cuts[at] + cuts[at + 1]) / 2
    ancestors, index = [], 0
    for point in range(count):
        while index < count - 1 and (point + offset) / count > ends[index]:
            index += 1
        ancestors.append(index)
    return ancestors


def residual(weights: Seq[float], chance: Chance) -> list[int]:
    """Ancestors by whole copies, and independent draws for the rest."""
    count, total = len(weights), sum(weights)
    expected = [count * weight / total for weight in weights]
    copies = [math.floor(one + 1e-12) for one in expected]
    ancestors = [index for index, number in enumerate(copies) for _ in range(number)]
    if (missing := count - len(ancestors)) > 0:
        rest = [max(0.0, one - number) for one, number in zip(expected, copies, strict=True)]
        ancestors += _independent(rest, missing, chance)
    return sorted(ancestors)


def _independent(weights: Seq[float], count: int, chance: Chance) -> list[int]:
    import torch

    law = torch.tensor(weights, dtype=torch.float64)
    return [chance.categorical(law) for _ in range(count)]


def _cumulative(weights: Seq[float]) -> list[float]:
    total, found, so_far = sum(weights), list[float](), 0.0
    for weight in weights:
        so_far += weight / total
        found.append(so_far)
    return found


SCHEMES: dict[str, Resampling] = {"multinomial": multinomial, "systematic": systematic, "residual": residual}

"""Goodness of fit: the G-test with rare outcomes pooled, its power, and Holm's adjustment."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

MINIMUM_EXPECTED = 5.0


def g_test(observed: ArrayLike, expected: ArrayLike) -> tuple[float, int]:
    """p-value and degrees of freedom of a G-test of counts against expected counts of equal total.

    Outcomes are pooled, rarest first, until every cell expects at least five; one cell left means (1.0, 0). An outcome
    seen although its probability is zero makes the p-value 0.
    """
    seen, due = np.asarray(observed, dtype=float), np.asarray(expected, dtype=float)
    if np.any((due <= 0) & (seen > 0)):
        return 0.0, max(1, len(due) - 1)
    order = np.argsort(due)
    cells: list[tuple[float, float]] = []
    pool_seen = pool_due = 0.0
    for index in order:
        pool_seen += seen[index]
        pool_due += due[index]
        if pool_due >= MINIMUM_EXPECTED:
            cells.append((pool_seen, pool_due))
            pool_seen = pool_due = 0.0
    if pool_due > 0 and cells:  # what is left joins the last cell
        cells[-1] = (cells[-1][0] + pool_seen, cells[-1][1] + pool_due)
    if len(cells) < 2:
        return 1.0, 0
    g = 2.0 * sum(s * math.log(s / d) for s, d in cells if s > 0)
    freedom = len(cells) - 1
    return float(stats.chi2.sf(max(g, 0.0), freedom)), freedom


def holm(p_values: Sequence[float]) -> float:
    """The smallest p-value, adjusted for the number of tests (Holm 1979; for the minimum this is Bonferroni's)."""
    return min(1.0, min(p_values) * len(p_values)) if p_values else 1.0


def detectable_bias(samples: int, freedom: int, alpha: float, power: float = 0.9) -> float | None:
    """Total variation distance that a test of this size finds with probability ``power``.

    For a bias that moves every outcome's probability by the same relative amount; None without degrees of freedom.
    """
    if freedom < 1 or samples < 1:
        return None
    threshold = stats.chi2.isf(alpha, freedom)

    def lack(noncentrality: float) -> float:
        return float(stats.ncx2.sf(threshold, freedom, noncentrality)) - power

    high = 1.0
    while lack(high) < 0:
        high *= 2.0
    noncentrality = optimize.brentq(lack, 1e-9, high)
    return float(min(1.0, 0.5 * math.sqrt(noncentrality / samples)))

"""Goodness of fit: tests of one and of two samples with rare outcomes pooled, their power, and Holm's adjustment.

The null of a test may be a bias instead of none: a total variation distance up to which distributions count as equal,
if every outcome's probability moves by the same relative amount, as by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

MINIMUM_EXPECTED = 5.0


def g_test(observed: ArrayLike, expected: ArrayLike, bias: float = 0.0) -> tuple[float, int]:
    """p-value and degrees of freedom of a G-test of counts against expected counts of equal total, up to a ``bias``.

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
    return _survival(max(g, 0.0), freedom, float(seen.sum()), bias), freedom


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pearson's statistic of two samples, or the sum of several.

    ``size``: how many draws, compared with a known distribution, would show a bias as clearly: half of one sample where
    both are equally large.
    """

    statistic: float = 0.0
    freedom: int = 0
    size: float = 0.0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(self.statistic + other.statistic, self.freedom + other.freedom, self.size + other.size)

    def p_value(self, bias: float = 0.0) -> float:
        """Of the null that the two distributions are at most ``bias`` apart (total variation)."""
        return _survival(self.statistic, self.freedom, self.size, bias) if self.freedom else 1.0


def compare(ours: Mapping[Any, int], theirs: Mapping[Any, int]) -> Comparison:
    """Compare two samples, given as counts of outcomes.

    Outcomes are pooled, those that are rarest in both samples together first, until every cell expects at least five
    in each sample. Pearson's statistic rather than G, because its mean stays right where many small tables are added.
    """
    mine, others = sum(ours.values()), sum(theirs.values())
    both = mine + others
    if not mine or not others:
        return Comparison()
    least = MINIMUM_EXPECTED * both / min(mine, others)
    cells: list[list[int]] = []
    pool = [0, 0]
    total = {outcome: ours.get(outcome, 0) + theirs.get(outcome, 0) for outcome in (*ours, *theirs)}
    for outcome in sorted(total, key=lambda one: (total[one], repr(one))):
        pool[0] += ours.get(outcome, 0)
        pool[1] += theirs.get(outcome, 0)
        if sum(pool) >= least:
            cells.append(pool)
            pool = [0, 0]
    if cells:  # what is left joins the last cell
        cells[-1] = [cells[-1][0] + pool[0], cells[-1][1] + pool[1]]
    if len(cells) < 2:
        return Comparison()
    statistic = 0.0
    for one, other in cells:
        expected = (one + other) * mine / both
        # Given the totals the mean of Pearson's statistic is freedom * both / (both - 1).
        statistic += (one - expected) ** 2 * (1 / expected + 1 / (one + other - expected)) * (both - 1) / both
    return Comparison(statistic, len(cells) - 1, mine * others / both)


def _survival(statistic: float, freedom: int, size: float, bias: float) -> float:
    """How likely a statistic of at least this is under a ``bias`` of ``size`` draws."""
    noncentrality = _noncentrality(bias, size)
    if not noncentrality:
        return float(stats.chi2.sf(statistic, freedom))
    return float(stats.ncx2.sf(statistic, freedom, noncentrality))


def _noncentrality(bias: float, size: float) -> float:
    return 4.0 * size * bias**2


def holm(p_values: Sequence[float]) -> float:
    """The smallest p-value, adjusted for the number of tests (Holm 1979; for the minimum this is Bonferroni's)."""
    return min(1.0, min(p_values) * len(p_values)) if p_values else 1.0


def detectable_bias(samples: float, freedom: int, alpha: float, power: float = 0.9, null: float = 0.0) -> float | None:
    """Total variation distance that a test of this size finds with probability ``power``.

    For a bias that moves every outcome's probability by the same relative amount; None without degrees of freedom.
    ``null``: the bias that the test allows.
    """
    if freedom < 1 or samples < 1:
        return None
    allowed = _noncentrality(null, samples)
    threshold = stats.ncx2.isf(alpha, freedom, allowed) if allowed else stats.chi2.isf(alpha, freedom)

    def lack(noncentrality: float) -> float:
        return float(stats.ncx2.sf(threshold, freedom, noncentrality)) - power

    high = max(1.0, 2.0 * allowed)
    while lack(high) < 0:
        high *= 2.0
    noncentrality = optimize.brentq(lack, 1e-9, high)
    return float(min(1.0, 0.5 * math.sqrt(noncentrality / samples)))

"""Statistics of the bench: ratios and shares with their intervals, and how much an output repeats itself.

Speed-up of a method over autoregressive decoding: the ratio of the two decode rates, each being the tokens of all
prompts together over their time together. Its 95 % interval is a paired percentile bootstrap over prompts (Efron and
Tibshirani 1993, chapter 13), with a batch size above one over the batches, whose prompts share the machine; a bootstrap
of few is too narrow, so it is widened as Student's t is wider than the normal distribution (Hesterberg 2015). Each
method answers a prompt once: how the machine differs from one run to the next is not in the interval.
``scipy.stats.bootstrap`` gives none as soon as one resample has no rate. Shares of right answers have intervals that do
not shrink to nothing where all answers agree (Wilson 1927; Agresti and Min 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.core.metrics import ratio

RESAMPLES = 4000
_CELLS = 4_000_000  # resamples x prompts held at once

_POWER = 0.8
_Z95, _Z_POWER = 1.959964, 0.841621  # of a two-sided test at 5 %, and of that power

Rate = tuple[float, float]
"""(tokens, seconds) of one prompt; or another sum, and what it is divided by."""
Columns = NDArray[np.float64]


def speedup(method: Sequence[Rate], reference: Sequence[Rate]) -> float | None:
    """Ratio of total decode rates; None where either is undefined."""
    ours, theirs = total_rate(method), total_rate(reference)
    return None if ours is None or theirs is None else ratio(ours, theirs)


def speedup_interval(
    method: Sequence[Rate], reference: Sequence[Rate], *, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Paired bootstrap interval of :func:`speedup`, (low, high), at confidence ``level``.

    None for fewer than two prompts, or where most resamples have no rate. Raises ValueError unless both have the same
    number of prompts, in the same order.
    """
    if len(method) != len(reference):
        raise ValueError("the bootstrap is paired: both methods need the same prompts")
    if len(method) < 2:
        return None
    found = _bootstrap(method, reference, lambda one, by, other, per: one * per / (by * other), seed, level, resamples)
    middle = speedup(method, reference)
    if found is None or middle is None or not 0.0 < found[0] <= found[1]:
        return found
    wider = widening(len(method), level)
    low, high = (middle * (bound / middle) ** wider for bound in found)
    return low, high


def difference_interval(
    method: Sequence[Rate], reference: Sequence[Rate], *, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Paired bootstrap interval of the difference of two ratios of totals; None as for :func:`speedup_interval`."""
    found = _bootstrap(method, reference, lambda one, by, other, per: one / by - other / per, seed, level, resamples)
    ours, theirs = total_rate(method), total_rate(reference)
    if found is None or ours is None or theirs is None:
        return found
    middle, wider = ours - theirs, widening(len(method), level)
    return middle + wider * (found[0] - middle), middle + wider * (found[1] - middle)


def rate_interval(
    parts: Sequence[Rate], *, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Bootstrap interval of a ratio of totals that are not negative; None as for :func:`speedup_interval`."""
    nothing = [(0.0, 1.0)] * len(parts)
    found = difference_interval(parts, nothing, seed=seed, level=level, resamples=resamples)
    return None if found is None else (max(0.0, found[0]), found[1])


def widening(size: int, level: float) -> float:
    """How much wider than that of a bootstrap an interval from ``size`` items has to be, on both sides."""
    from scipy.special import ndtri, stdtrit

    tail = 0.5 + 0.5 * level
    return float(stdtrit(size - 1, tail) / ndtri(tail) * math.sqrt(size / (size - 1)))


def _bootstrap(
    method: Sequence[Rate],
    reference: Sequence[Rate],
    figure: Callable[[Columns, Columns, Columns, Columns], Columns],
    seed: int,
    level: float,
    resamples: int,
) -> tuple[float, float] | None:
    if len(method) != len(reference):
        raise ValueError("the bootstrap is paired: both methods need the same prompts")
    if len(method) < 2:
        return None
    data: Columns = np.hstack([np.array(method, float), np.array(reference, float)])
    generator = np.random.default_rng(seed)
    size = len(data)
    figures = []
    for begin in range(0, resamples, block := max(1, _CELLS // size)):
        counts = generator.multinomial(size, np.full(size, 1.0 / size), size=min(block, resamples - begin))
        with np.errstate(divide="ignore", invalid="ignore"):
            figures.append(figure(*(counts @ data).T))
    found = np.concatenate(figures)
    found = found[np.isfinite(found)]  # a resample of prompts that were answered with a single token has no rate
    if len(found) < resamples / 2:
        return None
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def share_interval(count: int, of: int) -> tuple[float, float] | None:
    """95 % interval of the share ``count`` / ``of`` (Wilson 1927, equation 2); None of nothing."""
    if not of:
        return None
    share, square = count / of, _Z95**2 / of
    middle = share + square / 2
    half = _Z95 * math.sqrt(share * (1 - share) / of + square / (4 * of))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def paired_share_interval(gained: int, lost: int, of: int) -> tuple[float, float] | None:
    """95 % interval of the difference of two shares of the same ``of`` items; None of nothing.

    ``gained`` items count in the first share alone, ``lost`` ones in the second alone (Agresti and Min 2005, "Wald+2").
    """
    if not of:
        return None
    middle, half = (gained - lost) / (of + 2), _Z95 * _paired_error(gained, lost, of)
    return max(-1.0, middle - half), min(1.0, middle + half)


def smallest_share_difference(gained: int, lost: int, of: int) -> float | None:
    """The smallest difference of two paired shares that a test at 5 % shows with a power of 80 %.

    Where as many items differ between the two as did here: more of them make a small difference harder to see. But no
    smaller than where all that differ are lost: so many must be that the interval (:func:`paired_share_interval`)
    excludes 0, and they come with a binomial probability of 80 %.
    """
    if not of:
        return None
    from scipy.special import betaincinv

    least = next((count for count in range(1, of + 1) if _excludes_zero(0, count, of)), None)
    if least is None:  # so few items show nothing
        return 1.0
    floor = float(betaincinv(least, of - least + 1, _POWER))
    return min(1.0, max((_Z95 + _Z_POWER) * _paired_error(gained, lost, of), floor))


def _excludes_zero(gained: int, lost: int, of: int) -> bool:
    found = paired_share_interval(gained, lost, of)
    return found is not None and not found[0] <= 0.0 <= found[1]


def _paired_error(gained: int, lost: int, of: int) -> float:
    """Standard error of the difference, with half an item added to each of the four kinds."""
    size, differ = of + 2, gained + lost + 1
    return math.sqrt(differ - (gained - lost) ** 2 / size) / size


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> tuple[int, int]:
    """(n-grams that occurred before in the same output, n-grams in all)."""
    total = max(0, len(tokens) - n + 1)
    return total - len({tuple(tokens[i : i + n]) for i in range(total)}), total


def total_rate(parts: Iterable[Rate]) -> float | None:
    """Tokens per second of all prompts together; None where no time was spent."""
    parts = list(parts)
    return ratio(sum(tokens for tokens, _ in parts), sum(seconds for _, seconds in parts))

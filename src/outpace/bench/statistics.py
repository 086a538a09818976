"""Statistics of the bench: the speed-up with its interval, and how much an output repeats itself.

Speed-up of a method over autoregressive decoding: the ratio of the two decode rates, each being the tokens of all
prompts together over their time together. Its 95 % interval is a paired percentile bootstrap over prompts (Efron and
Tibshirani 1993, chapter 13). ``scipy.stats.bootstrap`` gives none as soon as one resample has no rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.core.metrics import ratio

RESAMPLES = 4000
_CELLS = 4_000_000  # resamples x prompts held at once

Rate = tuple[float, float]
"""(tokens, seconds) of one prompt."""


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
    data: NDArray[np.float64] = np.hstack([np.array(method, float), np.array(reference, float)])
    generator = np.random.default_rng(seed)
    size = len(data)
    ratios = []
    for begin in range(0, resamples, block := max(1, _CELLS // size)):
        counts = generator.multinomial(size, np.full(size, 1.0 / size), size=min(block, resamples - begin))
        tokens, seconds, reference_tokens, reference_seconds = (counts @ data).T
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios.append(tokens * reference_seconds / (seconds * reference_tokens))
    found = np.concatenate(ratios)
    found = found[np.isfinite(found)]  # a resample of prompts that were answered with a single token has no rate
    if len(found) < resamples / 2:
        return None
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> tuple[int, int]:
    """(n-grams that occurred before in the same output, n-grams in all)."""
    total = max(0, len(tokens) - n + 1)
    return total - len({tuple(tokens[i : i + n]) for i in range(total)}), total


def total_rate(parts: Iterable[Rate]) -> float | None:
    """Tokens per second of all prompts together; None where no time was spent."""
    parts = list(parts)
    return ratio(sum(tokens for tokens, _ in parts), sum(seconds for _, seconds in parts))

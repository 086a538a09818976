"""Statistics of the bench: the speed-up with its interval, and how much an output repeats itself.

Speed-up of a method over plain decoding: the ratio of the two decode rates, each being the tokens of all prompts
together over their time together. Its 95 % interval is a paired percentile bootstrap over prompts (Efron and
Tibshirani 1993, chapter 13): prompts are drawn with replacement, both methods' figures of a prompt stay together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.core.metrics import ratio

RESAMPLES = 4000
_CELLS = 4_000_000  # resamples x prompts held at once

Rate = tuple[float, float]
"""(tokens, seconds) of one prompt."""


def speedup(method: Sequence[Rate], plain: Sequence[Rate]) -> float | None:
    """Ratio of total decode rates; None where either is undefined."""
    ours, theirs = _rate(method), _rate(plain)
    return None if ours is None or theirs is None else ratio(ours, theirs)


def speedup_interval(
    method: Sequence[Rate], plain: Sequence[Rate], *, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Paired bootstrap interval of :func:`speedup`; None for fewer than two prompts or undefined ratios."""
    if len(method) != len(plain):
        raise ValueError("the bootstrap is paired: both methods need the same prompts")
    if len(method) < 2:
        return None
    data: NDArray[np.float64] = np.hstack([np.array(method, float), np.array(plain, float)])
    generator = np.random.default_rng(seed)
    size = len(data)
    ratios = []
    for begin in range(0, resamples, block := max(1, _CELLS // size)):
        counts = generator.multinomial(size, np.full(size, 1.0 / size), size=min(block, resamples - begin))
        tokens, seconds, plain_tokens, plain_seconds = (counts @ data).T
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios.append(tokens * plain_seconds / (seconds * plain_tokens))
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


def _rate(parts: Sequence[Rate]) -> float | None:
    return ratio(sum(tokens for tokens, _ in parts), sum(seconds for _, seconds in parts))

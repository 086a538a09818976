"""The law of ``sdsl``: acceptance from the size of a draft model, by way of its perplexity (Bozorgkhoo and Molybog
2026, arXiv 2603.11053).

The logarithm of the perplexity falls with the number N of weights as E + A N^-a, and the probability that a draft token
is accepted is a line over the perplexity. Fitted by least squares to some sizes, in each resample of the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from outpace.studies.decoded import Figures

_EXPONENTS = np.linspace(0.05, 1.5, 30)
_MOST = 0.999
_LARGEST = 50.0
"""Of a log-perplexity: beyond the sizes that a law was fitted to, it may say anything."""


@dataclass(frozen=True)
class AcceptanceLaw:
    """Each (R,). ``floor``, ``scale`` and ``exponent`` of the log-perplexity; ``slope`` and ``level`` of the line;
    ``determination``: R squared of the line on what it was fitted to."""

    floor: Figures
    scale: Figures
    exponent: Figures
    slope: Figures
    level: Figures
    determination: Figures

    def perplexity(self, weights: float) -> Figures:
        """(R,), of a draft model with so many ``weights``."""
        found: Figures = np.exp(np.minimum(self.floor + self.scale * weights**-self.exponent, _LARGEST))
        return found

    def acceptance(self, weights: float) -> Figures:
        """(R,), the probability that a draft token is accepted."""
        found: Figures = np.clip(self.slope * self.perplexity(weights) + self.level, 0.0, _MOST)
        return found


def fitted(weights: Seq[float], perplexity: Figures, acceptance: Figures) -> AcceptanceLaw:
    """The law of draft models with so many ``weights`` (S,), three or more; ``perplexity``, ``acceptance`` (R, S)."""
    logs, sizes = np.log(perplexity), np.asarray(weights, float)
    fits = [_line(np.broadcast_to(sizes**-one, logs.shape), logs) for one in _EXPONENTS]
    best = np.argmin([left for _, _, left in fits], axis=0)
    at = np.arange(len(logs))
    scale = np.array([slope for slope, _, _ in fits])[best, at]
    floor = np.array([level for _, level, _ in fits])[best, at]
    slope, level, left = _line(perplexity, acceptance)
    spread = ((acceptance - acceptance.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    determination = 1.0 - np.divide(left, spread, out=np.ones_like(left), where=spread > 0)
    return AcceptanceLaw(floor, scale, _EXPONENTS[best], slope, level, determination)


def _line(x: Figures, y: Figures) -> tuple[Figures, Figures, Figures]:
    """Slope, level and sum of squares that are left, (R,) each, of the line through x and y, (R, S) each."""
    from_x, from_y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    spread = (from_x**2).sum(axis=1)
    slope = np.divide((from_x * from_y).sum(axis=1), spread, out=np.zeros_like(spread), where=spread > 0)
    left = ((from_y - slope[:, None] * from_x) ** 2).sum(axis=1)
    return slope, y.mean(axis=1) - slope * x.mean(axis=1), left

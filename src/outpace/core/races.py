"""Races: the exact probability that given indices win several races that are run with the same noise.

With independent exponential times E_i, argmax(log w_i + G_i) for Gumbel noise G = -log E is argmin(E_i / w_i): index x
wins the race of weights w where E_x w_j <= E_j w_x for every j with a weight. Such conditions do not depend on the sum
of the times, and E divided by its sum is uniform on the simplex. So the probability that each of several races has a
given winner is the share of the simplex that all their conditions leave: the volume of a polytope.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Race = tuple[tuple[float, ...], int]
"""Weights, and the index that won."""
_THIN = 1e-10
"""Polytopes that hold no larger ball have no volume: their winners differ by rounding alone."""


@lru_cache(maxsize=100_000)
def probability(races: tuple[Race, ...]) -> float:
    """The probability that all ``races`` over the same indices, run with one noise, are won as they say."""
    import numpy as np

    [(weights, winner), *others] = races
    if not others:
        return float(weights[winner] / math.fsum(weights))
    size = len(weights)
    # No row at all where every race has one index with a weight: its winner is certain.
    rows = np.array([row for race in races for row in _conditions(*race)]).reshape(-1, size)
    conditions = np.unique(rows, axis=0)
    # Coordinates of the simplex: all times but the last, which is 1 less their sum.
    slopes, offsets = conditions[:, :-1] - conditions[:, -1:], conditions[:, -1]
    slopes = np.vstack([slopes, -np.eye(size - 1), np.ones(size - 1)])
    offsets = np.concatenate([offsets, np.zeros(size - 1), [-1.0]])
    return _volume(slopes, offsets) * math.factorial(size - 1)


def _conditions(weights: tuple[float, ...], winner: int) -> list[list[float]]:
    """Rows c with c . E <= 0, of length one."""
    rows = []
    for index, weight in enumerate(weights):
        if index != winner and weight > 0.0:
            row = [0.0] * len(weights)
            length = math.hypot(weight, weights[winner])
            row[winner], row[index] = weight / length, -weights[winner] / length
            rows.append(row)
    return rows


def _volume(slopes: np.ndarray, offsets: np.ndarray) -> float:
    """The volume of {x: slopes x + offsets <= 0}, a bounded set."""
    import numpy as np

    if slopes.shape[1] == 1:
        below = [-b / a for [a], b in zip(slopes, offsets, strict=True) if a > 0]
        above = [-b / a for [a], b in zip(slopes, offsets, strict=True) if a < 0]
        return max(0.0, float(min(below) - max(above)))
    from scipy.optimize import linprog
    from scipy.spatial import ConvexHull, HalfspaceIntersection

    # The centre of the largest ball inside, which the intersection of half-spaces begins with.
    lengths = np.linalg.norm(slopes, axis=1)
    ball = linprog(
        [*[0.0] * slopes.shape[1], -1.0],
        A_ub=np.column_stack([slopes, lengths]),
        b_ub=-offsets,
        bounds=[(None, None)] * slopes.shape[1] + [(0.0, None)],
    )
    if not ball.success or ball.x[-1] < _THIN:
        return 0.0
    corners = HalfspaceIntersection(np.column_stack([slopes, offsets]), ball.x[:-1]).intersections
    return float(ConvexHull(corners).volume)

"""The frontier of speed against divergence: the rows that no other row dominates."""

from __future__ import annotations

from collections.abc import Sequence


def on_frontier(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For every (divergence, speed-up), whether no other point is at least as good in both and better in one.

    A divergence counts by its size: answers that are likelier than the target's own diverge as well.
    """
    sized = [(abs(divergence), speed) for divergence, speed in points]
    return [not any(other[0] <= one[0] and other[1] >= one[1] and other != one for other in sized) for one in sized]

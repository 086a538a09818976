"""The frontier of speed against divergence: the rows that no other row dominates.

Autoregressive decoding is one of the rows that may: speed-up 1, no divergence.
"""

from __future__ import annotations

from collections.abc import Sequence

AUTOREGRESSIVE = (0.0, 1.0)


def on_frontier(points: Sequence[tuple[float, float]], lossless: Sequence[bool]) -> list[bool]:
    """For every (divergence, speed-up), whether no other point, nor autoregressive decoding, is at least as good in
    both and better in one. ``lossless``: whose divergence is none, whatever was measured of their samples.

    A divergence counts by its size: answers that are likelier than the target's own diverge as well.
    """
    sized = [(0.0 if exact else abs(by), speed) for (by, speed), exact in zip(points, lossless, strict=True)]
    rivals = [*sized, AUTOREGRESSIVE]
    return [not any(other[0] <= one[0] and other[1] >= one[1] and other != one for other in rivals) for one in sized]

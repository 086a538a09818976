"""How often draft tokens were accepted: by depth, rank among siblings, kind and task."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from outpace.controllers.predictor import chain_probs

WEIGHT = 8.0
"""What is known of a coarser class counts for a finer one as this many observations."""
MEMORY = 400.0
"""Above this many observations of a class, their weights are halved."""


class AcceptanceRecord:
    """Acceptance rates, given that all tokens before were accepted.

    Classes form a line, from all draft tokens to those of one depth, rank, kind and task. Each class is estimated by
    its own observations and, as :data:`WEIGHT` more, by the estimate of the next coarser one; so what was seldom seen
    is not unknown. ``prior``: the rate before anything was observed.
    """

    def __init__(self, prior: float = 0.7) -> None:
        self._prior = prior
        self._counts: dict[tuple[Hashable, ...], list[float]] = {}

    def add(self, hit: float, depth: int, rank: int = 0, kind: Hashable = None, task: str = "") -> None:
        """A draft token at ``depth`` (1 = first) was accepted (1) or not (0), or would have been with probability
        ``hit``."""
        for key in _classes(depth, rank, kind, task):
            counts = self._counts.setdefault(key, [0.0, 0.0])
            counts[0] += hit
            counts[1] += 1.0
            if counts[1] > MEMORY:
                counts[0] *= 0.5
                counts[1] *= 0.5

    def rate(self, depth: int, rank: int = 0, kind: Hashable = None, task: str = "") -> float:
        """The estimated acceptance rate, in [0, 1]."""
        rate = self._prior
        for key in _classes(depth, rank, kind, task):
            hits, seen = self._counts.get(key, (0.0, 0.0))
            rate = (WEIGHT * rate + hits) / (WEIGHT + seen)
        return rate

    def chain(self, length: int, kind: Hashable = None, task: str = "") -> list[float]:
        """Path acceptance probabilities of a chain of ``length`` tokens."""
        return list(chain_probs(self.rate(depth, 0, kind, task) for depth in range(1, length + 1)))


def _classes(depth: int, rank: int, kind: Hashable, task: str) -> Iterator[tuple[Hashable, ...]]:
    """From the coarsest to the finest; without those that say no more than the one before."""
    yield ()
    # Deep tokens are seldom reached, and differ little from one another.
    level = min(depth, 16)
    yield (level,)
    if rank:
        yield level, rank
    if kind is not None:
        yield level, rank, kind
    if task:
        yield level, rank, kind, task

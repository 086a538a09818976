"""Clusters of texts, found online: which earlier texts a new one is like.

A text is a bag of hashed tokens. Clusters are centroids; a text joins the one it is most like, by the cosine with rare
tokens weighing more, or opens a new one. No training, no model, 32 kilobytes a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from outpace.core.lru import Lru

Row = npt.NDArray[np.float64]
T = TypeVar("T")
BUCKETS = 4096


class Clusters(Generic[T]):
    """At most ``most`` clusters, each with something that ``make`` made; the least recently used leaves first.

    ``likeness``: the least cosine, in [0, 1], with which a text joins a cluster.
    """

    def __init__(self, make: Callable[[], T], most: int, likeness: float) -> None:
        self.most, self.likeness = most, likeness
        self._make = make
        self._clusters: Lru[int, tuple[Row, T]] = Lru(most)
        self._texts = 0
        self._seen: Row = np.zeros(BUCKETS)

    def __len__(self) -> int:
        return len(self._clusters)

    @property
    def evicted(self) -> int:
        """How many clusters have left for others."""
        return self._clusters.evicted

    def assign(self, text: Iterable[int]) -> T:
        """What belongs to the text's cluster, of which it becomes a part."""
        buckets = [token * 2_654_435_761 % 2**32 % BUCKETS for token in text]
        bag: Row = np.log1p(np.bincount(buckets, minlength=BUCKETS).astype(np.float64))
        self._texts += 1
        self._seen += bag > 0.0
        number = self._nearest(bag)
        found = None if number is None else self._clusters.get(number)
        if number is None or found is None:
            number, (centroid, held) = self._texts, (np.zeros(BUCKETS), self._make())
        else:
            centroid, held = found
        self._clusters.put(number, (centroid + bag, held))  # a sum will do: the cosine knows no length
        return held

    def _nearest(self, bag: Row) -> int | None:
        weights = np.log((1.0 + self._texts) / self._seen.clip(min=1.0))  # a token of every text tells little
        mine = bag * weights
        best, nearest = None, self.likeness
        for number, (centroid, _) in self._clusters.items():
            other = centroid * weights
            cosine = float(mine @ other) / max(1e-12, float(np.linalg.norm(mine) * np.linalg.norm(other)))
            if cosine >= nearest:
                best, nearest = number, cosine
        return best

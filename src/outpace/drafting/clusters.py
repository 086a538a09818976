"""Clusters of prompts, found online: which earlier prompts a new one is like.

A prompt is a bag of hashed tokens. Clusters are centroids; a prompt joins the one it is most like, by the cosine with
rare tokens weighing more, or opens a new one. No training, no model, 32 kilobytes a cluster.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float64]
T = TypeVar("T")
BUCKETS = 4096


class Clusters(Generic[T]):
    """At most ``most`` clusters, each with something that ``make`` made; the least recently used leaves first.

    ``likeness``: the least cosine, in [0, 1], with which a prompt joins a cluster.
    """

    def __init__(self, make: Callable[[], T], most: int, likeness: float) -> None:
        self.most, self.likeness = most, likeness
        self.evicted = 0
        self._make = make
        self._clusters: OrderedDict[int, tuple[Row, T]] = OrderedDict()
        self._prompts = 0
        self._seen: Row = np.zeros(BUCKETS)
        self._next = 0

    def __len__(self) -> int:
        return len(self._clusters)

    def assign(self, prompt: Iterable[int]) -> T:
        """What belongs to the prompt's cluster, of which it becomes a part."""
        buckets = [token * 2_654_435_761 % 2**32 % BUCKETS for token in prompt]
        bag: Row = np.log1p(np.bincount(buckets, minlength=BUCKETS).astype(np.float64))
        self._prompts += 1
        self._seen += bag > 0.0
        found = self._nearest(bag)
        if found is None:
            found, self._next = self._next, self._next + 1
            self._clusters[found] = bag, self._make()
        else:
            centroid, held = self._clusters[found]
            self._clusters[found] = centroid + bag, held  # a sum will do: the cosine knows no length
        self._clusters.move_to_end(found)
        held = self._clusters[found][1]
        while len(self._clusters) > self.most:
            self._clusters.popitem(last=False)
            self.evicted += 1
        return held

    def _nearest(self, bag: Row) -> int | None:
        weights = np.log((1.0 + self._prompts) / self._seen.clip(min=1.0))  # what every prompt holds says little
        mine = bag * weights
        best, nearest = None, self.likeness
        for number, (centroid, _) in self._clusters.items():
            other = centroid * weights
            cosine = float(mine @ other) / max(1e-12, float(np.linalg.norm(mine) * np.linalg.norm(other)))
            if cosine >= nearest:
                best, nearest = number, cosine
        return best

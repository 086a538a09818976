"""Trees that are fixed in advance, chosen by how often each choice of each parallel head was right.

As Medusa chooses its sparse tree (Cai et al. 2024, arXiv 2401.10774, section 2.3.3): a node stands for the r-th choice
of every head on its path, and is worth the product of these choices' accuracies.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

RANKS = 10
"""Choices of a head whose accuracy is measured."""


def typical_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """The ``nodes`` paths that are worth most, best first, each as the ranks of its choices (0: the likeliest).

    ``accuracies[k][r]``: how often the r-th choice of head k was the right token. A path's beginnings are among the
    paths. Fewer where there are no more, or where more would be worth nothing.
    """
    found: list[list[int]] = []
    waiting: list[tuple[float, list[int]]] = []

    def offer(worth: float, path: list[int]) -> None:
        if len(path) <= len(accuracies) and path[-1] < len(accuracies[len(path) - 1]):
            value = worth * accuracies[len(path) - 1][path[-1]]
            if value > 0.0:
                heapq.heappush(waiting, (-value, path))

    offer(1.0, [0])
    while waiting and len(found) < nodes:
        value, path = heapq.heappop(waiting)
        found.append(path)
        before = accuracies[len(path) - 1][path[-1]]
        offer(-value, [*path, 0])
        offer(-value / before, [*path[:-1], path[-1] + 1])  # its next sibling
    return found


def falling(accuracies: Sequence[float]) -> tuple[float, ...]:
    """Accuracies by rank, each at most that of the rank before: few samples may have them the other way around."""
    found: list[float] = []
    for one in accuracies:
        found.append(min(one, found[-1]) if found else one)
    return tuple(found)

"""Budget and Controller: how much to draft this round, and the expansion policy that drafters consult."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outpace.metrics import RequestMetrics


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a drafter may propose for one sequence in one round.

    ``depth``: draft tokens on the longest path; ``nodes``: nodes in the whole tree; ``width``: children per node;
    ``confidence``: a probabilistic drafter stops before the next draw when its largest q falls below it.
    ``Budget(0)`` means do not draft.
    """

    depth: int
    nodes: int = 64
    width: int = 1
    confidence: float = 0.0

    def limited(self, depth: int) -> Budget:
        """This budget, no deeper than ``depth`` (the room left in the answer or the context)."""
        return self if self.depth <= depth else replace(self, depth=max(0, depth))

    def wants(self, depth: int, confidence: float = 1.0) -> bool:
        """Whether to make a draw at ``depth`` (1 = first), given the largest probability of the row to draw from.

        Asked before the draw, so that no sampled draw is ever dropped for what it turned out to be.
        """
        return depth <= self.depth and confidence >= self.confidence

    @staticmethod
    def priority(log_q_path: float) -> float:
        """The order in which nodes are expanded and kept: probability of the path under the drafter."""
        return log_q_path if not math.isnan(log_q_path) else -math.inf


class Controller(ABC):
    """Turns what was measured so far into the next round's budget."""

    @abstractmethod
    def budget(self, metrics: RequestMetrics, batch: int, sampled: bool = False) -> Budget:
        """The budget for one request; ``batch`` requests share the round. ``sampled``: its temperature is above 0.

        For sampled requests it must not depend on measured times, so that a seed reproduces an answer.
        """

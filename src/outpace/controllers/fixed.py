"""The fixed controller: the same length and width every round, with an optional confidence threshold."""

from __future__ import annotations

from outpace.controllers.base import Budget, Controller
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics


class Fixed(Controller):
    """Always the same budget. Raises BadInput for a negative length, topk or max_nodes, or confidence not in [0, 1].

    ``confidence`` above 0 stops a probabilistic drafter before the next draw once its largest q is lower.
    """

    def __init__(self, length: int, topk: int = 1, max_nodes: int = 64, confidence: float = 0.0) -> None:
        for name, value in (("length", length), ("topk", topk), ("max_nodes", max_nodes)):
            if value < 0:
                raise BadInput(f"draft {name} must not be negative, not {value}")
        if not 0.0 <= confidence <= 1.0:
            raise BadInput(f"confidence must be in [0, 1], not {confidence}")
        self._budget = Budget(length, max_nodes, topk, confidence)

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        return self._budget

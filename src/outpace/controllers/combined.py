"""The controller of a combination: every part's own controller is asked, for its own budget."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.controllers.base import Budget, Controller
from outpace.core.metrics import RequestMetrics


class CombinedController(Controller):
    """As deep as the deepest part; ``parts[i]`` is the budget of part i.

    ``united``: whether the parts draft together into one tree, which then holds what all of them may draft, or one of
    them at a time. Where a part has relative costs, the whole has them: what a draft token costs does not depend on who
    drafted it. The parts' controllers go by the acceptance of the whole.
    """

    def __init__(self, parts: Seq[Controller], *, united: bool = False) -> None:
        self.parts = tuple(parts)
        self.united = united

    def budget(self, metrics: RequestMetrics, batch: int, sampled: bool = False) -> Budget:
        parts = tuple(part.budget(metrics, batch, sampled) for part in self.parts)
        nodes = [part.max_nodes for part in parts if part.depth > 0] or [0]
        costs = max(parts, key=lambda part: len(part.relative_costs))
        return Budget(
            depth=max(part.depth for part in parts),
            max_nodes=sum(nodes) if self.united else max(nodes),
            topk=max(part.topk for part in parts),
            relative_costs=costs.relative_costs,
            base_tokens=costs.base_tokens,
            parts=parts,
        )

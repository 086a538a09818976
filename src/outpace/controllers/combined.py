"""The controller of a combination: every part's own controller is asked, for its own budget."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.controllers.base import Budget, Controller
from outpace.core.metrics import RequestMetrics

_KEPT = 64
"""Budgets that are kept; those of parts that make new ones in every round are of no use later."""


class CombinedController(Controller):
    """As deep as the deepest part; ``parts[i]`` is the budget of part i.

    ``united``: whether the parts draft together into one tree, which then holds what all of them may draft, or one of
    them at a time. Where a part has relative costs, the whole has them: what a draft token costs does not depend on who
    drafted it. The parts' controllers go by the acceptance of the whole.
    """

    def __init__(self, parts: Seq[Controller], *, united: bool = False) -> None:
        self.parts = tuple(parts)
        self.united = united
        self.adapts = all(part.adapts for part in parts)
        self._known: dict[tuple[int, ...], Budget] = {}
        """By the identities of the parts' budgets, which they hold."""

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        parts = tuple([part.budget(metrics, batch, repeatable) for part in self.parts])
        # Parts give the same objects for long, and this is asked for every request in every round.
        same = tuple(map(id, parts))
        found = self._known.get(same)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[same] = self._combined(parts)
        return found

    def _combined(self, parts: tuple[Budget, ...]) -> Budget:
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

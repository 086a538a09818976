"""Costs are measured before the first request, for every number of requests at once that there may be."""

import pytest

from outpace.acceptance.greedy import Greedy
from outpace.controllers.base import Budget, Controller
from outpace.core.metrics import RequestMetrics
from outpace.engine.method import Method
from outpace.engine.warm_up import measure_drafts, warm_up
from outpace.methods.none import NoDraft
from outpace.targets.table import TableTarget


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_controller_and_drafter_meet_every_size(most: int, sizes: list[int]) -> None:
    asked: list[tuple[int, int]] = []
    measured: list[int] = []
    kinds: set[bool | None] = set()

    class Asked(Controller):
        def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
            asked.append((batch, metrics.prompt_tokens))
            return Budget(0)

    class Measured(NoDraft):
        def measure(self, batch: int, *, sampled: bool | None = None) -> None:
            measured.append(batch)
            kinds.add(sampled)

    warm_up(TableTarget(8, context_length=300), Method("one", Measured(), Greedy(), Asked()), most)
    assert measured == sizes and kinds == {None}
    assert asked == [(size, context) for size in sizes for context in (16, 256)]
    measured.clear()
    kinds.clear()
    measure_drafts(TableTarget(8), Method("one", Measured(), Greedy(), Asked()), most, sampled=True)
    assert measured == sizes and kinds == {True}

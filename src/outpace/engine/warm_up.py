"""What a method measures when it is first needed is measured before anyone waits for it."""

from __future__ import annotations

from outpace.core.metrics import RequestMetrics
from outpace.core.progress import stage
from outpace.core.turns import ROUNDS
from outpace.engine.method import Method
from outpace.targets.base import Target
from outpace.targets.costs import CONTEXTS


def warm_up(target: Target, method: Method, most: int) -> None:
    """Measure the costs of forwards and drafts for up to ``most`` requests at once.

    This takes seconds the first time on a machine; later the times are read from the cache.
    """
    contexts = [size for size in CONTEXTS if size <= target.context_length]
    with stage("measuring costs", brief=True), ROUNDS, target.round():
        for size in _sizes(most):
            for context in contexts:
                method.controller.budget(RequestMetrics(prompt_tokens=context), size)
            method.drafter.measure(size)


def measure_drafts(target: Target, method: Method, most: int, *, sampled: bool) -> None:
    """Measure what the method's drafts take for up to ``most`` requests at once, ``sampled`` or greedy ones, where it
    goes by such times."""
    with ROUNDS, target.round():
        for size in _sizes(most):
            method.drafter.measure(size, sampled=sampled)


def _sizes(most: int) -> list[int]:
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]

"""What a drafter's drafts take: a few rounds of a made-up text, so that nothing of it depends on anybody's request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outpace.acceptance.base import Verdict
from outpace.acceptance.default import default_rule
from outpace.controllers.base import Budget, Controller
from outpace.core.metrics import RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from torch import Tensor

REVISION = 2
"""Of what is timed. Where drafters become quicker, one more: times of sampled drafts are never corrected, since answers
depend on them."""
_PROMPT = 24
_LEVELS, _NODES = 2, 8
_FIRST, _ROUNDS = 4, 12
"""Rounds that are left out, for they read the prompt and little is of the target's own text; rounds that count."""
_LEAST, _ENOUGH = 4, 1.0
"""Rounds that count, once all rounds together have taken so many seconds: long ones are disturbed less, in proportion,
and a large model with many requests would be rehearsed for minutes."""


SAMPLED = SamplingParams(temperature=0.8, seed=0)
"""What a rehearsed request that samples asks for."""


class _TwoLevels(Controller):
    """Drafts of two levels where costs would decide: a made-up text is so improbable that most would have one."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        usual = self._controller.budget(metrics, batch, repeatable)
        if not usual.relative_costs:
            return usual
        return replace(
            usual, depth=min(_LEVELS, usual.depth), max_nodes=min(_NODES, usual.max_nodes), relative_costs=()
        )


class _Unverified(Drafter[Any]):
    """Drafts as ``inner`` does, and the target scores none of it. Only drafts are timed: a forward over the draft
    tokens of many requests would take most of the rehearsal, and hardly any of a made-up text would be accepted."""

    def __init__(self, inner: Drafter[Any]) -> None:
        self._inner = inner
        self.purpose = inner.purpose
        self.aux_hidden_state_layers = inner.aux_hidden_state_layers

    @property
    def prefill_layers(self) -> tuple[int, ...]:
        return self._inner.prefill_layers

    def begin(self, sequence: Sequence) -> Any:
        return self._inner.begin(sequence)

    def on_prefill(self, state: Any, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        self._inner.on_prefill(state, position, hidden_states)

    def propose_batch(self, states: Seq[Any], budgets: Seq[Budget]) -> list[TokenTree]:
        self._inner.propose_batch(states, budgets)
        return [TokenTree() for _ in states]

    def observe_batch(self, states: Seq[Any], verdicts: Seq[Verdict]) -> None:
        self._inner.observe_batch(states, verdicts)

    def end(self, state: Any) -> None:
        self._inner.end(state)


def recorded_as(what: str) -> str:
    """The name under which a machine keeps what ``what`` takes."""
    return f"{what}, revision {REVISION}"


def draft_seconds(
    target: Target, drafter: Drafter[Any], controller: Controller, count: int = 1, *, sampled: bool = False
) -> float:
    """Seconds that drafting takes in a round with ``count`` requests, greedy or ``sampled``: the median of a few rounds
    without the slowest quarter, which other programs have disturbed."""
    params = SAMPLED if sampled else SamplingParams()
    controller = _TwoLevels(controller)
    decoder = Decoder(target)
    unverified = _Unverified(drafter)
    method = Method("rehearsal", unverified, default_rule(unverified.proposal), controller)
    size, vocabulary = max(1, min(_PROMPT, target.context_length // 4)), target.vocab_size
    prompts = [tuple((37 * i + 11 * one + 5) % vocabulary for i in range(size)) for one in range(count)]
    running: list[Generation] = []
    spent: list[float] = []
    before, began = 0.0, perf_counter()
    try:
        running += [decoder.submit(Request(one, method, params, target.context_length)) for one in prompts]
        for number in range(_FIRST + _ROUNDS):
            if number >= _FIRST + _LEAST and perf_counter() - began > _ENOUGH:
                break
            going_on = decoder.step()
            now = running[0].metrics.phase_seconds["draft"]
            spent.append(now - before)
            before = now
            if not going_on:
                break
    finally:  # the K/V of all of them
        for one in running:
            one.cancel()
        decoder.step()
    usual = sorted(spent[_FIRST:] or spent)
    return median(usual[: (3 * len(usual) + 3) // 4])

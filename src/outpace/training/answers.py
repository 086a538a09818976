"""The target answers prompts, many at once, and the hidden states of its forwards are kept as they pass by.

Capturing costs no forward of its own: a drafter that drafts nothing reads the layers that drafters will read
(``on_prefill`` and ``observe``), so generation runs through the same round as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import Rejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.targets.base import Sequence, Target
from outpace.training.shards import Conversation

TOGETHER = 64
"""Requests that are answered at once."""
_RECALLED = 8
"""Conversations whose K/V is held at once while their states are computed again."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target is to answer. ``key`` names it for good."""

    key: str
    tokens: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class RecorderState(DraftState):
    """The hidden states that were kept of one request, chunk by chunk, by layer."""

    kept: dict[int, list[Tensor]] = field(default_factory=dict)

    def keep(self, hidden_states: Mapping[int, Tensor]) -> None:
        """Append rows (n, hidden) by layer."""
        for layer, rows in hidden_states.items():
            self.kept.setdefault(layer, []).append(rows.to("cpu", torch.bfloat16, copy=True))

    def states(self) -> dict[int, Tensor]:
        """What was kept, (tokens, hidden) bfloat16 by layer; the last row, whose token was never run, is zeros."""
        return {layer: torch.cat([*rows, torch.zeros_like(rows[0][:1])]) for layer, rows in self.kept.items()}


class Recorder(Drafter[RecorderState]):
    """Drafts nothing and keeps the hidden states of ``layers``: one row for every token but the last."""

    def __init__(self, layers: Seq[int]) -> None:
        self.aux_hidden_state_layers = tuple(layers)

    def begin(self, sequence: Sequence) -> RecorderState:
        return RecorderState(sequence)

    def on_prefill(self, state: RecorderState, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        state.keep(hidden_states)

    def propose(self, state: RecorderState, budget: Budget) -> TokenTree:
        return TokenTree()

    def observe(self, state: RecorderState, verdict: Verdict) -> None:
        state.keep({layer: rows[:1] for layer, rows in verdict.scores.hidden_states.items()})


def answered(
    target: Target,
    prompts: Iterable[Prompt],
    layers: Seq[int],
    *,
    most: int,
    stop_ids: frozenset[int],
    together: int = TOGETHER,
    wanted: Callable[[], bool] = lambda: True,
) -> Iterator[Conversation]:
    """Answers of up to ``most`` tokens, in the order in which they end, with states of ``layers``.

    An answer ends with its end token, where it has one: drafters learn when answers end. The last token was never run;
    its states are zeros. ``wanted`` is asked before another prompt is taken: False lets those under way end.
    """
    recorder = Recorder(layers)
    method = Method("record", recorder, Rejection(), Fixed(0))
    decoder, pending = Decoder(target), iter(prompts)
    running: dict[int, tuple[Prompt, Generation]] = {}
    try:
        while True:
            while len(running) < together and wanted():
                prompt = next(pending, None)
                if prompt is None:
                    break
                params = SamplingParams(temperature=prompt.temperature, seed=prompt.seed)
                request = Request(prompt.tokens, method, params, max_new_tokens=most, stop_ids=stop_ids)
                generation = decoder.submit(request)
                running[id(generation)] = (prompt, generation)
            if not running:
                return
            decoder.step()
            for name, (prompt, generation) in list(running.items()):
                if generation.finish_reason is None:
                    continue
                del running[name]
                if generation.error is None:
                    tokens, states = generation.sequence.tokens, generation.draft_state.states()
                    yield Conversation(prompt.key, list(prompt.tokens), tokens[len(prompt.tokens) :], states)
    finally:
        for _, generation in running.values():  # whoever stops listening, or an error: nothing is left open
            generation.cancel()
        decoder.admit()


def states_of(target: Target, conversations: Seq[Conversation], layers: Seq[int]) -> list[dict[int, Tensor]]:
    """The hidden states that answering would have kept, computed again from the conversations: equal up to rounding."""
    found: list[dict[int, Tensor]] = []
    for start in range(0, len(conversations), _RECALLED):
        found += _states_of(target, conversations[start : start + _RECALLED], layers)
    return found


def _states_of(target: Target, conversations: Seq[Conversation], layers: Seq[int]) -> list[dict[int, Tensor]]:
    kept: dict[Sequence, RecorderState] = {}
    try:
        for one in conversations:
            sequence = target.sequence(one.tokens)
            kept[sequence] = RecorderState(sequence)
        target.prefill(list(kept), tuple(layers), lambda sequence, _, states: kept[sequence].keep(states))
        return [state.states() for state in kept.values()]
    finally:
        for sequence in kept:
            target.close(sequence.kv)

"""The target answers prompts, many at once, and the hidden states of its forwards are kept as they pass by.

Capturing costs no forward of its own: a drafter that drafts nothing reads the layers that drafters will read
(``on_prefill`` and ``observe``), so generation runs through the same round as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import Rejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.targets.base import Sequence, Target, TreeScores
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


class Recorder(Drafter):
    """Drafts nothing and keeps the hidden states of ``layers``: one row for every token but the last."""

    def __init__(self, layers: Seq[int]) -> None:
        self.aux_hidden_state_layers = tuple(layers)
        self._kept: dict[Sequence, dict[int, list[Tensor]]] = {}

    def begin(self, sequence: Sequence) -> None:
        self._kept[sequence] = {layer: [] for layer in self.aux_hidden_state_layers}

    def on_prefill(self, sequence: Sequence, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        self._keep(sequence, hidden_states)

    def _keep(self, sequence: Sequence, hidden_states: Mapping[int, Tensor]) -> None:
        kept = self._kept[sequence]
        for layer, rows in hidden_states.items():
            kept[layer].append(rows.to("cpu", torch.bfloat16, copy=True))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        return [TokenTree() for _ in sequences]

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence, found in zip(sequences, scores, strict=True):
            self._keep(sequence, {layer: rows[:1] for layer, rows in found.hidden_states.items()})

    def states(self, sequence: Sequence) -> dict[int, Tensor]:
        """What was kept, (tokens, hidden) by layer, the last row zeros; forgotten with this call."""
        kept = self._kept.pop(sequence)
        return {layer: torch.cat([*pieces, torch.zeros_like(pieces[0][:1])]) for layer, pieces in kept.items()}


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
                states, tokens = recorder.states(generation.sequence), generation.sequence.tokens
                if generation.error is None:
                    yield Conversation(prompt.key, list(prompt.tokens), tokens[len(prompt.tokens) :], states)
    finally:
        for _, generation in running.values():  # whoever stops listening, or an error: nothing is left open
            generation.cancel()
        decoder.admit()


def states_of(target: Target, conversations: Seq[Conversation], layers: Seq[int]) -> list[dict[int, Tensor]]:
    """The states that answering would have kept, from a forward over what was said: equal up to rounding."""
    recorder = Recorder(layers)
    found: list[dict[int, Tensor]] = []
    for start in range(0, len(conversations), _RECALLED):
        sequences = []
        try:
            for one in conversations[start : start + _RECALLED]:
                sequences.append(target.sequence(one.tokens))
                recorder.begin(sequences[-1])
            target.prefill(sequences, tuple(layers), recorder.on_prefill)
            found += [recorder.states(sequence) for sequence in sequences]
        finally:
            for sequence in sequences:
                target.close(sequence.kv)
    return found

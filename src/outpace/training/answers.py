"""The target answers prompts, many at once, and the hidden states of its forwards are kept.

This costs no forward of its own: a drafter that drafts nothing reads the layers that drafters will read (``on_prefill``
and ``observe``), and generation runs through the same round as any other.
"""

from __future__ import annotations

import hashlib
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
from outpace.engine.decoder import Decoder, Generation, Request
from outpace.engine.method import Method
from outpace.targets.base import Sequence, Target, TreeScores
from outpace.training.shards import Conversation

TOGETHER = 64
"""Requests that are answered at once."""
_RECALLED = 8
"""Conversations whose K/V is held at once while their hidden states are computed again."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt in tokens, and how its answer is drawn. ``key``: the prompt's, which its conversation keeps."""

    key: str
    tokens: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AnswerSampling:
    """How answers are drawn: a ``share`` of them at ``temperature``, the others greedily; a prompt's key decides."""

    share: float = 0.3
    temperature: float = 0.8

    def of(self, key: str) -> tuple[float, int]:
        """Temperature and seed for the prompt of this key."""
        draw = seed_of(f"{key} sampled") / 2**31
        return (self.temperature if draw < self.share else 0.0), seed_of(f"{key} seed")


def seed_of(text: str) -> int:
    """A seed in [0, 2**31) that the text alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 2**31


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
        """The hidden states kept, bfloat16 (tokens, hidden) by layer, the last row zeros; dropped with this call."""
        kept = self._kept.pop(sequence)
        return {layer: torch.cat([*pieces, torch.zeros_like(pieces[0][:1])]) for layer, pieces in kept.items()}


def answered(
    target: Target,
    prompts: Iterable[PromptTokens],
    layers: Seq[int],
    *,
    most: int,
    stop_ids: frozenset[int],
    together: int = TOGETHER,
    wanted: Callable[[], bool] = lambda: True,
) -> Iterator[Conversation]:
    """Answers of up to ``most`` tokens, in the order in which they end, with hidden states of ``layers``.

    An answer includes its end token, where it has one: drafters learn when answers end. The last token is not
    forwarded; its states are zeros. ``together`` requests run at once. ``wanted`` is called before another prompt is
    taken; once it returns False, those under way end. Prompts that the engine refuses are left out.
    """
    recorder = Recorder(layers)
    method = Method("record", recorder, Rejection(), Fixed(0))
    decoder, pending = Decoder(target), iter(prompts)
    running: dict[int, tuple[PromptTokens, Generation]] = {}
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
        for _, generation in running.values():  # the caller stopped iterating, or an error
            generation.cancel()
        decoder.admit()


def states_of(target: Target, conversations: Seq[Conversation], layers: Seq[int]) -> list[dict[int, Tensor]]:
    """The hidden states that answering would have kept, (tokens, hidden) by layer, computed again from the tokens.

    Equal up to rounding: here one forward scores all tokens at once.
    """
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

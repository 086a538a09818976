"""The target answers prompts, many at once, and the hidden states of its forwards are kept.

This costs no forward of its own: a drafter that drafts nothing reads the layers that drafters will read (``on_prefill``
and ``observe``), and generation runs through the same round as any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

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


class Answering(Protocol):
    """What answers prompts: :func:`answered` of a target, or a server in its place."""

    def __call__(
        self,
        prompts: Iterable[PromptTokens],
        layers: Seq[int],
        *,
        most: int,
        stop_ids: frozenset[int],
        together: int = ...,
        over: Callable[[], bool] = ...,
    ) -> Iterator[Conversation]: ...


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
    prompts: Iterable[PromptTokens],
    layers: Seq[int],
    *,
    most: int,
    stop_ids: frozenset[int],
    together: int = TOGETHER,
    over: Callable[[], bool] = lambda: False,
) -> Iterator[Conversation]:
    """Answers of up to ``most`` tokens, in the order in which they end, with hidden states of ``layers``.

    An answer includes its end token, where it has one: drafters learn when answers end. The last token is not
    forwarded; its states are zeros. ``together`` requests run at once. ``over`` is called after every round; once it
    returns True, those under way end as they are. Prompts that the engine refuses are left out.
    """
    recorder = Recorder(layers)
    method = Method("record", recorder, Rejection(), Fixed(0))
    decoder, pending = Decoder(target), iter(prompts)
    running: dict[int, tuple[PromptTokens, Generation]] = {}
    try:
        while True:
            while len(running) < together and not over():
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
            if over():
                for _, generation in running.values():
                    if generation.tokens:
                        generation.finish("length")
            for name, (prompt, generation) in list(running.items()):
                if generation.finish_reason is None:
                    continue
                del running[name]
                if generation.error is None:
                    tokens, states = generation.sequence.tokens, generation.draft_state.states()
                    yield Conversation(prompt.key, list(prompt.tokens), tokens[len(prompt.tokens) :], states)
    finally:
        for _, generation in running.values():  # the caller stopped iterating, or an error
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

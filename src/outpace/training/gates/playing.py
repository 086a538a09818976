"""Decoding with a draft model while something watches what it drafts and what the target accepts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from outpace.acceptance.base import AcceptanceRule, Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.drafting.model_drafter import DraftModel, ModelDraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.gates.features import row_features
from outpace.methods.gated.sprinter import GatedChainBuilder
from outpace.targets.base import Sequence, Target

TOGETHER = 16
"""Requests that are decoded at once."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt in tokens. ``key`` tells it apart from others: its labels are learned from, or held out, together."""

    key: str
    tokens: tuple[int, ...]


class RecordingBuilder(GatedChainBuilder):
    """A chain whose every token passes, and the features of each."""

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance) -> None:
        super().__init__(sequence, budget, chance, self._record)
        self.features: list[Tensor] = []

    def _record(self, probs: Tensor, token: int, depth: int, greedy: bool) -> bool:
        self.features.append(row_features(probs, token, depth, greedy=greedy))
        return True


Watch = Callable[[Sequence, Seq[Tensor], Verdict], None]
"""Told of a round: the request's sequence, the features of its draft tokens, and the verdict with its scores."""


class RecordingDrafter(DraftModel):
    """Drafts chains, and tells ``watch`` of every round in which it drafted."""

    def __init__(self, draft: Target, watch: Watch) -> None:
        super().__init__(draft, RecordingBuilder)
        self._watch = watch

    def observe_batch(self, states: Seq[ModelDraftState], verdicts: Seq[Verdict]) -> None:
        for state, verdict in zip(states, verdicts, strict=True):
            if isinstance(state.builder, RecordingBuilder) and state.builder.features:
                self._watch(state.sequence, state.builder.features, verdict)
        super().observe_batch(states, verdicts)


def played(
    target: Target,
    drafter: DraftModel,
    rule: AcceptanceRule,
    prompts: Iterable[tuple[Asked, SamplingParams]],
    *,
    num_draft_tokens: int,
    most: int,
    stop_ids: frozenset[int],
    over: Callable[[int], bool],
) -> list[tuple[Asked, Generation]]:
    """Answers of up to ``most`` tokens to ``prompts``, drafted by ``drafter`` and judged by ``rule``.

    ``over``: asked after every round, with the number of answer tokens so far; once it returns True, requests that
    are under way are left out, and no other begins. Prompts that the engine refuses are left out.
    """
    method = Method("gate-labels", drafter, rule, Fixed(num_draft_tokens, 1, num_draft_tokens))
    decoder, pending = Decoder(target), iter(prompts)
    running: list[tuple[Asked, Generation]] = []
    done: list[tuple[Asked, Generation]] = []
    finished, stopped = 0, over(0)
    try:
        while not stopped:
            while len(running) < TOGETHER and (one := next(pending, None)) is not None:
                asked, params = one
                try:
                    generation = decoder.submit(
                        Request(asked.tokens, method, params, max_new_tokens=most, stop_ids=stop_ids)
                    )
                except BadInput:  # longer than the context
                    continue
                running.append((asked, generation))
            if not running:
                break
            decoder.step()
            ended = [one for one in running if one[1].finish_reason is not None]
            running = [one for one in running if one[1].finish_reason is None]
            done += [one for one in ended if one[1].error is None]
            finished += sum(len(generation.tokens) for _, generation in ended)
            stopped = over(finished + sum(len(generation.tokens) for _, generation in running))
    finally:
        for _, generation in running:
            generation.cancel()
        decoder.admit()
    return done

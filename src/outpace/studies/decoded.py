"""Answers of methods that a study compares: the same prompts, in turns, with what every round drafted and committed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace

from outpace.bench.records import Answer, answer_together
from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.model import Model
from outpace.prompts.prompt import Prompt


@dataclass
class Decoded:
    """Answers by method, in the order of ``prompts``."""

    prompts: list[Prompt]
    answers: dict[str, list[Answer]] = field(default_factory=dict)


def contexts_of(model: Model, prompts: Seq[Prompt], max_new_tokens: int) -> dict[tuple[int, ...], Prompt]:
    """The prompts that fit, as token ids. Raises BadInput where none does."""
    room = model.target.context_length - max_new_tokens
    found = {tuple(model.tokenizer.chat(one.messages)): one for one in prompts}
    fitting = {ids: one for ids, one in found.items() if 0 < len(ids) < room}
    if not fitting:
        raise BadInput(f"no prompt fits into the model's context of {model.target.context_length} tokens")
    return fitting


def decode(
    model: Model,
    methods: Mapping[str, Method],
    prompts: Seq[Prompt],
    *,
    batch: int = 1,
    max_new_tokens: int = 48,
    params: SamplingParams | None = None,
    trees: bool = False,
    seed: int = 0,
) -> Decoded:
    """Let every method answer every prompt, ``batch`` at a time, the methods in turns whose order is shuffled.

    Short answers that do not count come first, so that costs are measured before. ``trees``: keep the trees, too.
    """
    contexts = contexts_of(model, prompts, max_new_tokens)
    params = params or SamplingParams(seed=seed)
    ids, found = list(contexts), Decoded(list(contexts.values()), {name: [] for name in methods})

    def answered(method: Method, first: int, some: Seq[tuple[int, ...]], length: int) -> list[Answer]:
        requests = [
            Request(one, method, _seeded(params, first + at), length, model.eos_ids, trace=trees, counts=True)
            for at, one in enumerate(some)
        ]
        return answer_together(model.target, requests, batch)

    for method in methods.values():
        answered(method, 0, ids[:batch], min(8, max_new_tokens))
    size = 4 * batch if batch > 1 else 1
    with stage("answering prompts", total=len(ids) * len(methods), unit="answers") as at:
        for first in range(0, len(ids), size):
            order = list(methods)
            random.Random(f"{seed}/{batch}/{first}").shuffle(order)
            for name in order:
                some = ids[first : first + size]
                found.answers[name] += answered(methods[name], first, some, max_new_tokens)
                at.move(sum(map(len, found.answers.values())), detail=name)
    return found


def _seeded(params: SamplingParams, number: int) -> SamplingParams:
    return replace(params, seed=params.fixed_seed + 1_000_003 * number)

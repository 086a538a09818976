"""Answers of methods that a study compares: the same prompts, in turns, with what every round drafted and committed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.bench.records import Answer, AnswerBatch, answer_together
from outpace.bench.slices import in_slices
from outpace.core.errors import BadInput
from outpace.core.metrics import CacheUse, RequestMetrics
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.engine.request import Request, RoundCount
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.studies.study_journal import StudyJournal

Figures = NDArray[np.float64]

_TOGETHER = 8
"""Prompts of a part that is kept, at least."""
_FILLED = 2
"""Times that the places of a batch are filled before the next method's turn, as in the bench."""


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
    warm_up: bool = True,
    seed: int = 0,
    journal: StudyJournal | None = None,
) -> Decoded:
    """Let every method answer every prompt, ``batch`` at a time, the methods in turns whose order is shuffled.

    ``warm_up``: short answers that do not count come first, so that costs are measured before. ``trees``: keep the
    trees, too. ``journal``: keeps answers, without trees, a part for a few prompts each (:func:`parts_of`).
    """
    contexts = contexts_of(model, prompts, max_new_tokens)
    params = params or SamplingParams(seed=seed)
    ids, found = list(contexts), Decoded(list(contexts.values()), {name: [] for name in methods})

    def requests(method: Method, first: int, some: Seq[tuple[int, ...]], length: int) -> list[Request]:
        return [
            Request(one, method, _seeded(params, first + at), length, model.eos_ids, trace=trees, counts=True)
            for at, one in enumerate(some)
        ]

    size, journal = turn_of(batch), journal or StudyJournal()
    warm = not warm_up

    def turns(some: range) -> dict[str, list[Answer]]:
        nonlocal warm
        if not warm:
            for method in methods.values():
                answer_together(model.target, requests(method, 0, ids[:batch], min(8, max_new_tokens)), batch)
            warm = True
        part: dict[str, list[Answer]] = {name: [] for name in methods}
        for first in range(some.start, some.stop, size):
            order = list(methods)
            random.Random(f"{seed}/{batch}/{first}").shuffle(order)
            now = ids[first : min(first + size, some.stop)]
            batches = {
                name: AnswerBatch(model.target, requests(methods[name], first, now, max_new_tokens), batch)
                for name in order
            }
            for name, answers in in_slices(batches, lambda name: at.move(detail=name)).items():
                if isinstance(answers, Exception):
                    raise answers
                part[name] += answers
            at.move(sum(len(each[name]) for each in (found.answers, part) for name in methods))
        return part

    with stage("answering prompts", total=len(ids) * len(methods), unit="answers") as at:
        for label, some in parts_of(len(ids), batch).items():
            part = journal.part(label, lambda some=some: turns(some), packed_answers, unpacked_answers)  # type: ignore[misc]
            for name in methods:
                found.answers[name] += part[name]
    return found


def parts_of(count: int, batch: int) -> dict[str, range]:
    """The parts in which ``count`` prompts are answered ``batch`` at a time, by name."""
    turn = turn_of(batch)
    size = turn * max(1, -(-_TOGETHER // turn))
    parts = (range(at, min(at + size, count)) for at in range(0, count, size))
    return {f"batch {batch}, prompts {one.start + 1} to {one.stop}": one for one in parts}


def turn_of(batch: int) -> int:
    """Prompts that a method answers in one turn. They share the machine: intervals are over turns."""
    return _FILLED * batch if batch > 1 else 1


def packed_answers(found: Mapping[str, Seq[Answer]]) -> dict[str, Any]:
    """Answers by method as JSON holds them; without the trees of their rounds."""
    return {
        name: [
            {
                "context": one.context,
                "tokens": one.tokens,
                "metrics": asdict(one.metrics),
                "ttft": one.ttft,
                "cut_off": one.cut_off,
                "counts": [astuple(each) for each in one.counts],
                "wall": one.wall,
            }
            for one in answers
        ]
        for name, answers in found.items()
    }


def unpacked_answers(kept: Mapping[str, Seq[Mapping[str, Any]]]) -> dict[str, list[Answer]]:
    """What :func:`packed_answers` has made."""
    return {name: [_unpacked(one) for one in answers] for name, answers in kept.items()}


def _unpacked(one: Mapping[str, Any]) -> Answer:
    metrics = RequestMetrics(**one["metrics"])
    metrics.caches = tuple(CacheUse(**each) for each in one["metrics"]["caches"])
    counts = [RoundCount(*each) for each in one["counts"]]
    context, tokens = tuple(one["context"]), tuple(one["tokens"])
    return Answer(context, tokens, metrics, one["ttft"], one["cut_off"], (), counts, one["wall"])


def _seeded(params: SamplingParams, number: int) -> SamplingParams:
    return replace(params, seed=params.fixed_seed + 1_000_003 * number)


def whole(count: int) -> Figures:
    """(1, count): weights under which each of ``count`` prompts counts once."""
    return np.ones((1, count))


def decode_rate(weights: Figures, answers: Seq[Answer]) -> Figures:
    """(R,): tokens a second after the first round, in each resample of the prompts. ``weights`` (R, P)."""
    tokens = np.array([one.metrics.decode_tokens for one in answers], float)
    seconds = np.array([one.metrics.decode_seconds for one in answers])
    found: Figures = (weights @ tokens) / np.maximum(weights @ seconds, 1e-9)
    return found


def speedup(weights: Figures, answers: Seq[Answer], plain: Seq[Answer]) -> Figures:
    """(R,): the ratio of decode rates, both summed over the prompts; 1 where nothing was decoded after first tokens."""
    base = decode_rate(weights, plain)
    found: Figures = np.divide(decode_rate(weights, answers), base, out=np.ones_like(base), where=base > 0)
    return found


def tokens_per_round(weights: Figures, answers: Seq[Answer]) -> Figures:
    """(R,): tokens that a round commits, the target's own included."""
    committed = np.array([one.metrics.committed for one in answers], float)
    rounds = np.array([one.metrics.rounds for one in answers], float)
    found: Figures = (weights @ committed) / np.maximum(weights @ rounds, 1.0)
    return found

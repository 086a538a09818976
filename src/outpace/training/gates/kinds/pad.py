"""``outpace train pad``: would this rejected draft token cost the answer? Labels are counterfactual continuations.

The model answers tasks with a known answer greedily, with a draft model. Where its answer is right, each draft token
that it rejected is put in the place of its own token, and the model itself continues from there. If the answer is then
wrong, the token is a pivot. The paper averages several sampled continuations; here there is one, at temperature 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from functools import partial

from pydantic import Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.greedy import Greedy
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT
from outpace.core.validation import StrictModel
from outpace.drafting.model_drafter import DraftModel
from outpace.gates.features import state_features, state_features_of
from outpace.prompts.final_answer import final_answer, is_right
from outpace.prompts.task import ExactAnswer
from outpace.targets.base import TreeScores
from outpace.training.answers import PromptTokens, answered
from outpace.training.gates.classifier import Labels, fit, stopping_threshold
from outpace.training.gates.playing import TOGETHER, Asked, played
from outpace.training.gates.registry import gate
from outpace.training.gates.work import MadeGate, Work

LENGTH = 6
"""Draft tokens of a round while labels are collected."""


class PadOptions(StrictModel):
    """Settings of ``outpace train pad``."""

    missed: float = Field(
        0.1, ge=0, lt=1, description="share of pivots that the gate may let stand, on held-out prompts"
    )
    per_prompt: int = Field(6, ge=1, le=1000, description="rejected draft tokens of an answer that are tried, at most")
    hidden: int = Field(8, ge=1, le=1024, description="width of the classifier's hidden layer")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """``token`` was drafted and rejected after ``context``, of which the first ``prompt_length`` are the prompt."""

    prompt: tuple[int, ...]
    context: tuple[int, ...]
    token: int
    features: Tensor


class MismatchRecorder(Greedy):
    """The greedy walk; keeps the draft token at which it ended, where there was one."""

    lossless = False  # a lossless rule is not asked at temperature 0

    def __init__(self, layer: int) -> None:
        self.aux_hidden_state_layers = (layer,)
        self._layer = layer
        self.found: list[Mismatch] = []

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        verdict, sequence = super().decide(scores, chance), scores.sequence
        node = verdict.path[-1] if verdict.path else ROOT
        if drawn := scores.tree.draws_at(node):
            features = state_features(scores, node, drawn[0].node, self._layer)
            accepted = [scores.tree.tokens[one] for one in verdict.path]
            prompt = tuple(sequence.tokens[: sequence.prompt_length])
            self.found.append(Mismatch(prompt, (*sequence.tokens, *accepted), drawn[0].token, features))
        return verdict


@gate(
    "pad",
    options=PadOptions,
    reads_draft=False,
    checks_answers=True,
    figures={
        "tasks": "{} tasks",
        "right": "{} answered right",
        "mismatches": "{} rejected draft tokens",
        "labels": "{} labels",
        "auc": "AUC {}",
        "standing": "{:.0%} of the held-out ones stand",
        "missed": "{:.0%} of the pivots stand",
    },
)
def train_pad(work: Work) -> MadeGate:
    """Labels, a classifier, and the threshold for ``missed``. Raises BadInput where labels are too few."""
    model, options = work.model, work.options
    recorder = MismatchRecorder(model.target.num_layers)
    known: dict[tuple[int, ...], ExactAnswer] = {}  # by prompt: files may number their tasks alike

    def prompts() -> Iterator[tuple[Asked, SamplingParams]]:
        for prompt in work.prompts:
            assert isinstance(prompt.task, ExactAnswer)
            tokens = tuple(model.tokenizer.chat(prompt.messages))
            known[tokens] = prompt.task
            yield Asked(prompt.id, tokens), SamplingParams()

    done = played(
        model.target,
        DraftModel(work.draft),
        recorder,
        prompts(),
        num_draft_tokens=LENGTH,
        most=work.answer_tokens,
        stop_ids=model.eos_ids,
        over=partial(work.enough, first_half=True),
    )
    right = {one.tokens: known[one.tokens] for one, made in done if _right(work, known[one.tokens], made.tokens)}
    if not right:
        raise BadInput(
            f"the model answered none of {len(done)} tasks right, so no draft token can be a pivot; give easier ones "
            "with --prompts"
        )
    tried = _chosen(work, [one for one in recorder.found if one.prompt in right])
    data = Labels()
    for one, answer in _continued(work, tried):
        data.add(one.features, not _right(work, right[one.prompt], answer), str(one.prompt))
    fitted = fit(data, options.hidden, work.seed, work.all_over, "pivots")
    threshold = stopping_threshold(fitted, options.missed)
    stands = fitted.probs < threshold
    figures = {
        "tasks": len(done),
        "right": len(right),
        "mismatches": len(recorder.found),
        **fitted.figures,
        "standing": round(float(stands.float().mean()), 4),
        "missed": round(float(stands[fitted.labels > 0.5].float().mean()), 4),
    }
    return MadeGate({"threshold": threshold}, figures, fitted.gate, state_features_of(model.target), options.hidden)


def _right(work: Work, task: ExactAnswer, answer: Seq[int]) -> bool:
    text = work.model.tokenizer.decode([token for token in answer if token not in work.model.eos_ids])
    final = final_answer(text, task)
    return final is not None and is_right(final, task)


def _chosen(work: Work, found: Seq[Mismatch]) -> list[Mismatch]:
    """At most ``per_prompt`` mismatches of each prompt, drawn by the seed; none behind an answer's end."""
    draw, by_prompt = random.Random(work.seed), dict[tuple[int, ...], list[Mismatch]]()
    for one in found:
        answer = one.context[len(one.prompt) :]
        if not work.model.eos_ids.intersection(answer) and len(answer) < work.answer_tokens:
            by_prompt.setdefault(one.prompt, []).append(one)
    chosen = [draw.sample(several, min(work.options.per_prompt, len(several))) for several in by_prompt.values()]
    draw.shuffle(chosen)  # where time ends before all are tried, whole prompts are left out
    return [one for several in chosen for one in several]


def _continued(work: Work, tried: Seq[Mismatch]) -> Iterator[tuple[Mismatch, tuple[int, ...]]]:
    """Each mismatch with the answer that begins with its draft token; those that time cut short are left out."""
    ends = work.model.eos_ids
    going = []
    for at, one in enumerate(tried):
        if one.token in ends:
            yield one, one.context[len(one.prompt) :]
        else:
            going.append(PromptTokens(str(at), (*one.context, one.token)))
    for found in answered(
        work.model.target, going, (), most=work.answer_tokens, stop_ids=ends, together=TOGETHER, over=work.over
    ):
        one, rest = tried[int(found.key)], tuple(found.answer)
        if rest[-1] in ends or len(rest) >= work.answer_tokens:
            yield one, (*one.context[len(one.prompt) :], one.token, *rest)

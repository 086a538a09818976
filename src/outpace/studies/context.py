"""``context``: how acceptance and costs change with the length of the context, to 16,000 tokens.

The same requests are asked behind more and more other text, so that lengths differ in nothing else. After one prefill
every method decodes the same answer; forwards over one row and over a draft are timed at each length. Claims: the
longer the context, the less verifying costs beside decoding, as both read the K/V (MagicDec, Sadhukhan et al. 2024,
arXiv 2408.11049); heads that were trained on short contexts have less accepted in long ones, until they slow decoding
down (OWL, Lee et al. 2025, arXiv 2510.07535).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from pydantic import Field

from outpace.bench.records import Answer, answer_together
from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.core.validation import StrictModel
from outpace.engine.known_answers import KnownAnswer, close_answers, known_answers
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts, stratified
from outpace.studies.claims import FROM, TO, Claim, above, interval, resampled
from outpace.studies.decoded import Figures, packed_answers, speedup, tokens_per_round, unpacked_answers, whole
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study

_PLAIN = "none"


class ContextSettings(StrictModel):
    """Settings of ``context``."""

    contexts: list[int] = Field(
        [1024, 2048, 4096, 8192, 16384],
        min_length=2,
        description="tokens of a prompt, about; longer ones than the model's context are cut to it",
    )
    methods: list[str] = Field(
        ["sam", "eagle3", "draft-model"], min_length=1, description="methods, beside autoregressive decoding"
    )
    draft_model: str = Field("", description="draft model of methods that take one; by default what is shipped")
    texts: int = Field(7, ge=1, description="requests that are asked at each length, at most")
    draft_tokens: int = Field(7, ge=1, le=64, description="draft tokens of the forwards that are timed")
    repeat: int = Field(5, ge=1, description="how often they are timed")
    max_new_tokens: int = Field(32, ge=2, description="tokens of an answer, at most")


@dataclass(frozen=True, slots=True)
class _Text:
    """What was measured on one text: see :class:`_Length`."""

    tokens: int
    prefill: float
    step: float
    verify: float
    answers: dict[str, Answer]

    def packed(self) -> dict[str, Any]:
        """As JSON holds it."""
        answers = packed_answers({name: [one] for name, one in self.answers.items()})
        figures = {"tokens": self.tokens, "prefill": self.prefill, "step": self.step, "verify": self.verify}
        return {**figures, "answers": answers}

    @classmethod
    def unpacked(cls, kept: Mapping[str, Any]) -> _Text:
        """What :meth:`packed` has made."""
        answers = {name: one for name, [one] in unpacked_answers(kept["answers"]).items()}
        return cls(**{**kept, "answers": answers})


@dataclass
class _Length:
    """What was measured at one length, each list in the order of the requests."""

    tokens: list[int] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    """Tokens a second."""
    step: list[float] = field(default_factory=list)
    """Seconds of a forward over one row."""
    verify: list[float] = field(default_factory=list)
    """Of one over a draft as well, in forwards over one row."""
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def add(self, one: _Text) -> None:
        """The next text."""
        self.tokens.append(one.tokens)
        self.prefill.append(one.prefill)
        self.step.append(one.step)
        self.verify.append(one.verify)
        for name, answer in one.answers.items():
            self.answers[name].append(answer)


@study(
    "context",
    title="Acceptance and costs by the length of the context",
    paper="Sadhukhan et al. 2024, arXiv 2408.11049; Lee et al. 2025, arXiv 2510.07535",
    resumable=True,
)
def contexts(context: StudyContext, settings: ContextSettings) -> Findings:
    """Decode the same requests behind ever more text."""
    model = context.model
    lengths = _lengths(model, settings)
    named, draft = dict.fromkeys(settings.methods), context.draft_model(settings.draft_model)
    methods = {name: model.method(name, draft_model=draft) for name in (_PLAIN, *named)}
    prompts = _short(model, stratified(context.prompts, settings.texts), lengths[0])
    found = {length: _Length(answers={name: [] for name in methods}) for length in lengths}
    context.journal.plan({_part(length, at): float(length) for length in lengths for at in range(len(prompts))})
    warm: set[int] = set()

    def measured(length: int, index: int) -> _Text:
        text = behind(model, prompts[index], length)
        one = _measure(model, methods, text, settings, context.seed + index, warm=length in warm)
        warm.add(length)
        return one

    with stage("reading contexts", total=len(lengths) * len(prompts), unit="texts") as at:
        for number, length in enumerate(lengths):
            for index in range(len(prompts)):
                one = context.journal.part(
                    _part(length, index),
                    lambda length=length, index=index: measured(length, index),  # type: ignore[misc]
                    _Text.packed,
                    _Text.unpacked,
                )
                found[length].add(one)
                at.move(number * len(prompts) + index + 1, detail=f"{length} tokens")
    weights, once = resampled(len(prompts), context.seed), whole(len(prompts))
    rows = [_row(one, name, weights, once) for one in found.values() for name in named]
    reading = [name for name in named if methods[name].drafter.prefill_layers]
    series = {
        name: [
            PlotPoint(row["context"], row["tokens"], row["low"], row["high"]) for row in rows if row["method"] == name
        ]
        for name in named
    }
    columns = {"context": "context", "method": "method", "tokens": "tokens/round", "low": FROM, "high": TO}
    columns |= {"speedup": "speed-up", "speedup_low": FROM, "speedup_high": TO, "draft": "draft share"}
    columns |= {"step_ms": "forward (ms)", "verify": f"with {settings.draft_tokens} draft tokens"}
    columns |= {"prefill": "prefill (tok/s)"}
    notes = [
        f"The same {len(prompts)} requests at each length, behind prompts of the embedded set, which repeat where the "
        f"context is longer than they are. Costs of a forward with draft tokens are in forwards over one row. "
        f"Speed-ups are those after the first token: reading the prompt is not in them, and neither is a draft "
        f"model's reading of it."
    ]
    if lengths[-1] < max(settings.contexts):
        notes.append(f"The model's context ends at {model.target.context_length} tokens.")
    title = "Tokens a round by length of the context"
    plot = Plot(title, "tokens of context", "tokens a round", series, logarithmic=True)
    return Findings(rows, columns, _claims(found, reading, weights, once), plot, notes)


def _part(length: int, number: int) -> str:
    return f"{length} tokens, text {number + 1}"


def _lengths(model: Model, settings: ContextSettings) -> list[int]:
    """Lengths that the model has, ascending. Raises BadInput where that is only one."""
    if min(settings.contexts) < 1:
        raise BadInput("contexts must be at least 1")
    most = model.target.context_length - settings.max_new_tokens - settings.draft_tokens - 1
    found = sorted({min(one, most) for one in settings.contexts})
    if len(found) < 2 or most < 1:
        raise BadInput(
            f"the model's context of {model.target.context_length} tokens leaves no two lengths to compare; give "
            "shorter contexts"
        )
    return found


def _short(model: Model, prompts: Seq[Prompt], length: int) -> list[Prompt]:
    """The prompts that fit into the shortest context. Raises BadInput where none does."""
    found = [one for one in prompts if 0 < len(model.tokenizer.chat(one.messages)) <= length]
    if not found:
        raise BadInput(f"no prompt fits into the shortest context, {length} tokens; give longer contexts")
    return found


def behind(model: Model, prompt: Prompt, length: int) -> tuple[int, ...]:
    """The request of ``prompt`` behind as many other texts as ``length`` tokens hold, as token ids."""
    others = [one.text for one in load_prompts() if one.text != prompt.text]
    *before, last = prompt.messages

    def ids(pieces: Seq[str]) -> tuple[int, ...]:
        text = "\n\n".join((*pieces, last["content"]))
        return tuple(model.tokenizer.chat([*before, {**last, "content": text}]))

    pieces: list[str] = []
    expected = len(ids(pieces))
    for piece in _endless(others, prompt.text):
        expected += len(model.tokenizer.encode(f"{piece}\n\n"))
        if expected > length:
            break
        pieces.append(piece)
    while pieces and len(ids(pieces)) > length:  # pieces together may have a few tokens more than each by itself
        pieces.pop()
    return ids(pieces)


def _endless(texts: Seq[str], name: str) -> Iterator[str]:
    """The texts in an order of their own for each request, again and again."""
    order = list(texts)
    random.Random(name).shuffle(order)
    return cycle(order)


def _measure(
    model: Model,
    methods: Mapping[str, Method],
    text: tuple[int, ...],
    settings: ContextSettings,
    seed: int,
    *,
    warm: bool,
) -> _Text:
    """Read one text once, time forwards after it, and decode its answer with every method. ``warm``: whether a text of
    this length was read before, so that methods that weigh costs have measured them."""
    target, plain = model.target, methods[_PLAIN]
    layers = {layer for one in methods.values() for layer in one.drafter.prefill_layers}
    began = perf_counter()
    known = known_answers(target, [Request(text, plain, SamplingParams(), 1, model.eos_ids)], layers)
    seconds = perf_counter() - began
    try:
        one, alone = _forwards(model, known[0], settings)
        order = list(methods)
        random.Random(f"{seed}/{len(text)}").shuffle(order)
        for name in () if warm else order:
            _decoded(model, methods[name], known[0], min(8, settings.max_new_tokens))
        answers = {name: _decoded(model, methods[name], known[0], settings.max_new_tokens) for name in order}
    finally:
        close_answers(target, known)
    return _Text(len(text), len(text) / seconds, alone, one / alone, answers)


def _forwards(model: Model, known: KnownAnswer, settings: ContextSettings) -> tuple[float, float]:
    """Median seconds of a forward with a draft, and of one without, by turns."""
    trees = [TokenTree.chain(known.prompt[: settings.draft_tokens]), TokenTree()]
    seconds: list[list[float]] = [[], []]
    with model.target.round():
        for number in range(settings.repeat + 1):
            for tree, into in zip(trees, seconds, strict=True):
                began = perf_counter()
                model.target.score([(known.sequence, tree)])
                if number:  # the first ones only warm up
                    into.append(perf_counter() - began)
    return median(seconds[0]), median(seconds[1])


def _decoded(model: Model, method: Method, known: KnownAnswer, length: int) -> Answer:
    request = Request(known.prompt, method, SamplingParams(), length, model.eos_ids, kept=known.sequence)
    [found] = answer_together(model.target, [request])
    return found


def _row(one: _Length, name: str, weights: Figures, once: Figures) -> dict[str, Any]:
    answers, plain = one.answers[name], one.answers[_PLAIN]
    low, high = interval(tokens_per_round(weights, answers))
    slow, fast = interval(speedup(weights, answers, plain))
    phases = [answer.metrics.phase_seconds for answer in answers]
    return {
        "context": round(float(np.mean(one.tokens))),
        "method": name,
        "tokens": float(tokens_per_round(once, answers)[0]),
        "low": low,
        "high": high,
        "speedup": float(speedup(once, answers, plain)[0]),
        "speedup_low": slow,
        "speedup_high": fast,
        "draft": sum(each["draft"] for each in phases) / max(1e-9, sum(sum(each.values()) for each in phases)),
        "step_ms": 1e3 * float(np.mean(one.step)),
        "verify": float(np.mean(one.verify)),
        "prefill": float(np.mean(one.prefill)),
    }


def _claims(found: Mapping[int, _Length], reading: Seq[str], weights: Figures, once: Figures) -> list[Claim]:
    """``reading``: methods that draft from the target's hidden states."""
    short, long = found[min(found)], found[max(found)]

    def cheaper(some: Figures) -> Figures:
        ratio: Figures = (some @ np.array(short.verify)) / (some @ np.array(long.verify))
        return ratio

    claims = [
        above(
            "verifying a draft costs less, beside a forward over one row, in the longest context than in the shortest",
            float(cheaper(once)[0]),
            cheaper(weights),
            1.0,
        )
    ]
    for name in reading:

        def lost(some: Figures, name: str = name) -> Figures:
            ratio: Figures = tokens_per_round(some, short.answers[name]) / tokens_per_round(some, long.answers[name])
            return ratio

        def slower(some: Figures, name: str = name) -> Figures:
            return speedup(some, long.answers[_PLAIN], long.answers[name])

        claims.append(
            above(
                f"{name} commits fewer tokens a round in the longest context than in the shortest",
                float(lost(once)[0]),
                lost(weights),
                1.0,
            )
        )
        claims.append(
            above(
                f"in the longest context {name} is slower than autoregressive decoding",
                float(slower(once)[0]),
                slower(weights),
                1.0,
            )
        )
    return claims

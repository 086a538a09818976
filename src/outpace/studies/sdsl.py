"""``sdsl``: does a law fitted to five draft models tell the best size before it is trained? (Bozorgkhoo and Molybog
2026, arXiv 2603.11053.)

Draft models of five sizes are trained on the target's own answers. The law (:mod:`outpace.studies.acceptance_law`)
tells the acceptance of every other size; with what a forward of that size takes here, which needs no training, it tells
the speed-up. The size that it finds best is trained then, and all six decode.

Unlike in the paper, times are measured instead of counted in operations, and perplexity is that of the target's own
answers, drawn at temperature 1, over the tokens that draft models can draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from outpace.controllers.predictor import Predictor
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.known_answers import KnownAnswer, close_answers, known_answers
from outpace.engine.request import Request
from outpace.heads.head_config import SIZES
from outpace.model import Model
from outpace.prompts.questions import stratified
from outpace.studies.acceptance_law import AcceptanceLaw, fitted
from outpace.studies.claims import FROM, TO, Claim, above, holds, interval, resampled
from outpace.studies.decoded import Decoded, Figures, contexts_of, decode, parts_of, speedup, whole
from outpace.studies.draft_sizes import (
    CONTEXT,
    DraftSettings,
    DraftSize,
    Judged,
    draft_seconds,
    folder_of,
    judged,
    read_size,
    trained,
)
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study

_TIMES, _CHOICE = "times of all sizes", "the size that is predicted"
_LAYERS = (1, 2, 3, 4, 6, 8, 12)
_NARROWEST = 64
"""Width of a layer's MLP below which a size is no candidate."""
_CLOSE, _FAST = 0.02, 0.97
_SMALLER = (100.0, 400.0)
"""Times that the best draft model is smaller than its target: about 200, says the paper."""


class SdslSettings(DraftSettings):
    """Settings of ``sdsl``."""

    sizes: list[str] = Field(
        ["1:tiny", "2:base", "4:base", "6:large", "12:large"],
        min_length=3,
        description="draft models that are trained first, as LAYERS:SIZE; all layers share the MLP of one of SIZE",
    )
    candidates: list[str] = Field(
        [], description="sizes among which the law chooses; by default 1 to 12 layers in all sizes"
    )
    longest: int = Field(6, ge=1, le=16, description="draft tokens, at most")
    max_new_tokens: int = Field(32, ge=2, description="tokens of an answer that acceptance is measured on, at most")
    timed: int = Field(14, ge=1, description="prompts that all draft models decode, at most")


@dataclass(frozen=True)
class _Prediction:
    """What laws of the prompts (R = 1) or of their resamples say of sizes. ``seconds``: of their forwards, by name;
    ``steps`` (lengths,): what verifying 1, 2, ... draft tokens takes, in autoregressive steps of ``step`` seconds."""

    law: AcceptanceLaw
    seconds: Mapping[str, float]
    steps: Figures
    step: float

    def speedups(self, one: DraftSize) -> Figures:
        """(R, lengths)."""
        return chain_speedups(self.law.acceptance(one.weights), self.steps, self.seconds[one.name] / self.step)


@study(
    "sdsl",
    title="The best size of a draft model, told before it is trained",
    paper="Bozorgkhoo and Molybog 2026, arXiv 2603.11053",
    resumable=True,
)
def sdsl(context: StudyContext, settings: SdslSettings) -> Findings:
    """Train five sizes, fit the law, train the size that it finds best, and decode with all."""
    model = context.model
    if model.target.costs.fixed:
        raise BadInput("study 'sdsl' compares times: leave out --fixed-costs")
    first = [read_size(model, text, settings) for text in settings.sizes]
    if len({one.name for one in first}) < len(first):
        raise BadInput("a size is named twice")
    candidates = _candidates(model, first, settings)
    answers = _answers(context, settings)
    weights, once = resampled(len(answers), context.seed), whole(len(answers))
    journal = context.journal
    timed = len(stratified(context.prompts, settings.timed))
    sizes = [one.name for one in first]
    trainings = {_part(name): 10.0 for name in (*sizes, "of the size that is predicted")}
    journal.plan(
        {
            **trainings,
            _TIMES: 2.0,
            _CHOICE: 0.1,
            **{name: float(len(some)) for name, some in parts_of(timed, 1).items()},
        }
    )
    with journal.room("sdsl") as place:

        def learned(one: DraftSize, label: str) -> Path:
            """Train it, or go on where that was ended; answer tokens are counted with it."""
            tokens = journal.part(
                _part(label), lambda: trained(model, one, place, settings, context.seed, journal.check)
            )
            counted.append(tokens)
            return folder_of(one, place)

        counted: list[int] = []
        heads = {one.name: learned(one, one.name) for one in first}
        found = {name: judged(model, folder, answers) for name, folder in heads.items()}
        seconds = journal.part(_TIMES, lambda: draft_seconds(model, [*first, *candidates]))
        here, drawn = (_predicted(model, first, found, seconds, settings, some) for some in (once, weights))

        def choice() -> dict[str, Any]:
            best = max(candidates, key=lambda one: float(here.speedups(one).max()))
            return {"size": best.name, "length": int(here.speedups(best)[0].argmax()) + 1}

        # Kept, as costs that are measured anew might choose another one than the parts that follow are of.
        chosen = journal.part(_CHOICE, choice)
        best, length = next(one for one in candidates if one.name == chosen["size"]), int(chosen["length"])
        heads[best.name] = learned(best, "of the size that is predicted")
        found[best.name] = judged(model, heads[best.name], answers)
        decoded = _decoded(context, heads, length, settings)
    rows = [
        {**_row(one, found[one.name], here, length, decoded, weights), "chosen": one is best} for one in (*first, best)
    ]
    columns = {"size": "size", "weights": "weights", "chosen": "predicted best", "perplexity": "perplexity"}
    columns |= {"predicted": "acceptance, by law", "acceptance": "acceptance", "low": FROM, "high": TO}
    columns |= {"draft_ms": "forward (ms)", "promised": "speed-up, by law", "speedup": "speed-up"}
    columns |= {"speedup_low": FROM, "speedup_high": TO}
    every = sorted((*first, *candidates), key=lambda one: one.weights)
    series = {
        "law": [PlotPoint(one.weights / 1e6, float(here.law.acceptance(one.weights)[0])) for one in every],
        "trained first": [_point(row) for row in rows[:-1]],
        "predicted best": [_point(rows[-1])],
    }
    notes = [
        f"Trained on {counted[-1]} tokens of answers. The law chose {best.name} among {len(candidates)} sizes, and "
        f"drafts of {length} tokens, with which all decode. Weights are those of the draft model's layers: embedding "
        f"and LM head ({min(settings.vocabulary, model.target.vocab_size)} tokens) are the target's."
    ]
    return Findings(
        rows,
        columns,
        [
            *_of_the_law(here, drawn, best, [found[one.name] for one in first], found[best.name], weights),
            _as_fast(best, decoded),
            *_smaller(model, candidates, drawn),
        ],
        Plot("Acceptance by size of the draft model", "million weights", "acceptance", series, logarithmic=True),
        notes,
    )


def _part(name: str) -> str:
    return f"draft model {name}"


def chain_speedups(acceptance: Figures, steps: Figures, draft: float) -> Figures:
    """(R, lengths): of chains of 1, 2, ... tokens. ``acceptance`` (R,) of each token; ``steps`` (lengths,): what
    verifying takes, and ``draft`` what a forward of the draft model does, in autoregressive steps."""
    count = np.arange(1, len(steps) + 1)
    tokens = 1.0 + np.cumsum(acceptance[:, None] ** count, axis=1)
    found: Figures = tokens / (steps + draft * count)
    return found


def _candidates(model: Model, first: Seq[DraftSize], settings: SdslSettings) -> list[DraftSize]:
    """Sizes among which the law chooses. Raises BadInput where there are none beside those that are trained first."""
    known = {one.name for one in first}
    if settings.candidates:
        found = [read_size(model, text, settings) for text in dict.fromkeys(settings.candidates)]
    else:
        every = [read_size(model, f"{layers}:{size}", settings) for layers in _LAYERS for size in SIZES]
        found = [one for one in every if one.config.intermediate >= _NARROWEST]
    found = [one for one in found if one.name not in known]
    if not found:
        raise BadInput("every candidate is trained already; name other sizes")
    return found


def _answers(context: StudyContext, settings: SdslSettings) -> list[KnownAnswer]:
    """The target's answers, drawn at temperature 1. Raises BadInput where every one ends at once."""
    model, plain = context.model, context.model.method("none")
    contexts = contexts_of(model, context.prompts, settings.max_new_tokens)
    seeded = (SamplingParams(temperature=1.0, seed=context.seed + at) for at in range(len(contexts)))
    requests = [
        Request(ids, plain, params, settings.max_new_tokens, model.eos_ids)
        for ids, params in zip(contexts, seeded, strict=True)
    ]
    answers = known_answers(model.target, requests)
    close_answers(model.target, answers)  # draft models read the tokens alone
    found = [one for one in answers if len(one.tokens) > 1]
    if not found:
        raise BadInput("the model ends every answer at once: there is nothing to draft")
    return found


def _predicted(
    model: Model,
    first: Seq[DraftSize],
    found: Mapping[str, Judged],
    seconds: Mapping[str, float],
    settings: SdslSettings,
    weights: Figures,
) -> _Prediction:
    """The law of the sizes that were trained first, and what costs are known."""
    law = fitted(
        [one.weights for one in first],
        np.stack([found[one.name].perplexity(weights) for one in first], axis=1),
        np.stack([found[one.name].acceptance(weights) for one in first], axis=1),
    )
    predictor = Predictor(model.target.costs)
    steps = [predictor.verification(count, 1, CONTEXT) for count in range(1, settings.longest + 1)]
    return _Prediction(law, seconds, np.array(steps), model.target.costs.seconds(1, CONTEXT))


def _decoded(context: StudyContext, folders: Mapping[str, Path], length: int, settings: SdslSettings) -> Decoded:
    """Answers drawn at temperature 1: without drafts ("none"), and with every draft model by its size."""
    model = context.model
    wish = {"draft": "sampled", "depth": length, "confidence": 0.0}
    methods = {name: model.method("distill", wish, head=folder) for name, folder in folders.items()}
    return decode(
        model,
        {"none": model.method("none"), **methods},
        stratified(context.prompts, settings.timed),
        max_new_tokens=settings.max_new_tokens,
        params=SamplingParams(temperature=1.0, seed=context.seed),
        seed=context.seed,
        journal=context.journal,
    )


def _row(
    one: DraftSize, its: Judged, here: _Prediction, length: int, decoded: Decoded, weights: Figures
) -> dict[str, Any]:
    once, timed = whole(weights.shape[1]), len(decoded.prompts)
    low, high = interval(its.acceptance(weights))
    answers, plain = decoded.answers[one.name], decoded.answers["none"]
    slow, fast = interval(speedup(resampled(timed), answers, plain))
    return {
        "size": one.name,
        "layers": one.layers,
        "weights": one.weights,
        "perplexity": float(its.perplexity(once)[0]),
        "predicted": float(here.law.acceptance(one.weights)[0]),
        "acceptance": float(its.acceptance(once)[0]),
        "low": low,
        "high": high,
        "draft_ms": 1e3 * here.seconds[one.name],
        "promised": float(here.speedups(one)[0, length - 1]),
        "speedup": float(speedup(whole(timed), answers, plain)[0]),
        "speedup_low": slow,
        "speedup_high": fast,
    }


def _point(row: Mapping[str, Any]) -> PlotPoint:
    return PlotPoint(row["weights"] / 1e6, row["acceptance"], row["low"], row["high"])


def _of_the_law(
    here: _Prediction, drawn: _Prediction, best: DraftSize, first: Seq[Judged], its: Judged, weights: Figures
) -> list[Claim]:
    """That the law fits what it was fitted to, and tells the size that it was not."""
    mean = np.mean([one.acceptance(weights) for one in first], axis=0)
    return [
        above(
            "acceptance is a line over the draft model's perplexity (R squared over the sizes that were trained first)",
            float(here.law.determination[0]),
            drawn.law.determination,
            0.9,
        ),
        holds(
            f"the law tells the acceptance of a size before it is trained, within {_CLOSE:g} and better than the "
            "mean of the others",
            tells(drawn.law.acceptance(best.weights), mean, its.acceptance(weights)),
        ),
    ]


def tells(law: Figures, mean: Figures, truth: Figures) -> NDArray[np.bool_]:
    """(R,): whether a law is close to the truth, and closer than the ``mean`` of the sizes that it was fitted to: where
    all of them accept about as much, that is close as well, and the law adds nothing."""
    apart = np.abs(law - truth)
    found: NDArray[np.bool_] = (apart <= _CLOSE) & (apart < np.abs(mean - truth))
    return found


def _as_fast(best: DraftSize, decoded: Decoded) -> Claim:
    """That the predicted size decodes about as fast as the fastest of the others, or faster."""
    timed, plain = len(decoded.prompts), decoded.answers["none"]
    others = [answers for name, answers in decoded.answers.items() if name not in ("none", best.name)]

    def beside(some: Figures) -> Figures:
        fastest = np.max([speedup(some, one, plain) for one in others], axis=0)
        ratio: Figures = speedup(some, decoded.answers[best.name], plain) / np.maximum(fastest, 1e-9)
        return ratio

    says = f"the predicted size decodes at least {100 * _FAST:.0f} % as fast as the fastest of the others"
    return above(says, float(beside(whole(timed))[0]), beside(resampled(timed)), _FAST)


def _smaller(model: Model, candidates: Seq[DraftSize], drawn: _Prediction) -> list[Claim]:
    """How much smaller than its target the best draft model is, by the law; nothing for a target of unknown size."""
    target = float(model.info.get("parameters") or 0)
    if not target:
        return []
    gains = np.stack([drawn.speedups(one).max(axis=1) for one in candidates], axis=1)
    ratios = target / np.array([one.weights for one in candidates])[gains.argmax(axis=1)]
    few, many = _SMALLER
    says = f"by the law, the best draft model is about 200 times smaller than the target ({few:.0f} to {many:.0f})"
    return [holds(says, (ratios >= few) & (ratios <= many))]

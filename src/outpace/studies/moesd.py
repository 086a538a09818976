"""``moesd``: speculation with sparse mixtures of experts, by formula and on a tiny mixture (Huang et al. 2025, arXiv
2505.19645).

At a moderate batch the requests' tokens use nearly all experts anyway, so that verifying several tokens of each reads
hardly more weights. *Target efficiency* is the time of an autoregressive round over that of a round with K draft tokens
for each request: 1 where verifying is free. By formula: rooflines of a mixture and of a dense model. Measured: the
model's own MLPs as experts (:mod:`outpace.studies.upcycled`), on batches of different sequences, and whether a model
that is fitted to some batches tells the others.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from pydantic import Field

from outpace.controllers.predictor import Predictor, one_rate, speedups, tokens_per_round
from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.core.validation import StrictModel
from outpace.engine.known_answers import close_answers, known_answers
from outpace.engine.request import Request
from outpace.simulate.hardware import find_hardware
from outpace.simulate.model_shape import ModelShape, find_shape
from outpace.simulate.roofline import Parallel, Roofline, RooflineCosts
from outpace.studies.claims import Claim, above, by_formula, holds, resampled, undecided
from outpace.studies.decoded import Figures, contexts_of
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study

_CONTEXT = 512
_REPEAT = 5
_GROUP = 4
"""Sequences of a batch whose experts are compared with the formula."""
_MOST_ROWS = 128
_BALANCED = 2048
"""Tokens over which experts are used about as often."""
_CLOSE = 0.1
_GAINS = 1.2
"""A speed-up from which on a batch counts as one at which speculation gains."""


class MoesdSettings(StrictModel):
    """Settings of ``moesd``."""

    hardware: str = Field("h100", description="preset of the rooflines")
    mixture: str = Field("qwen2-57b-a14b", description="shape of the mixture")
    dense: str = Field("qwen2.5-14b", description="shape of the dense model beside it")
    tensor_parallel: int = Field(4, ge=1, description="devices that share each layer")
    lengths: list[int] = Field([1, 3, 5], min_length=1, description="draft tokens of each request")
    batches: list[int] = Field(
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], min_length=2, description="requests decoded at once"
    )
    rate: float = Field(0.8, ge=0, le=1, description="assumed acceptance rate of each draft token")
    tiny: bool = Field(True, description="also measure a tiny mixture on this machine")
    experts: int = Field(8, ge=2, le=64, description="experts of the tiny mixture")
    active: int = Field(2, ge=1, description="of these used by each token")


@study("moesd", title="Speculation with sparse mixtures of experts", paper="Huang et al. 2025, arXiv 2505.19645")
def moesd(context: StudyContext, settings: MoesdSettings) -> Findings:
    """Rooflines of a mixture and a dense model by batch and draft length, and a tiny mixture measured here."""
    mixture, dense = find_shape(settings.mixture), find_shape(settings.dense)
    if mixture.experts < 2:
        raise BadInput(f"{mixture.name} is a dense model; name a mixture of experts")
    if settings.active > settings.experts:
        raise BadInput(f"a token cannot use {settings.active} of {settings.experts} experts")
    if min(settings.batches) < 1 or min(settings.lengths) < 1:
        raise BadInput("batches and lengths must be at least 1")
    costs = {one.name: _costs(one, settings) for one in (mixture, dense)}
    batches, length = sorted(set(settings.batches)), max(settings.lengths)
    rows: list[dict[str, Any]] = [
        {
            "batch": batch,
            "length": count,
            "experts_alone": mixture.touched_experts(batch),
            "experts_drafting": mixture.touched_experts(batch * (1 + count)),
            "efficiency": 1.0 / costs[mixture.name].relative(count, batch, _CONTEXT),
            "efficiency_dense": 1.0 / costs[dense.name].relative(count, batch, _CONTEXT),
            "speedup": _gain(costs[mixture.name], count, batch, settings.rate),
            "speedup_dense": _gain(costs[dense.name], count, batch, settings.rate),
        }
        for batch in batches
        for count in settings.lengths
    ]
    longest = [row for row in rows if row["length"] == length]
    claims = [
        by_formula(
            "at some moderate batch a sparse mixture gains more than a dense model",
            max(row["speedup"] / row["speedup_dense"] for row in longest),
            1.0,
        ),
        by_formula(
            "the target efficiency of a mixture is highest at a moderate batch, above batch 1 and above the largest",
            max(row["efficiency"] for row in longest) / max(longest[0]["efficiency"], longest[-1]["efficiency"]),
            1.0,
        ),
        _sparser(mixture, settings, batches),
    ]
    notes = [
        f"By formula: {mixture.name} and {dense.name} on {settings.tensor_parallel} x {settings.hardware}, drafting "
        f"free, {settings.rate:g} of the draft tokens accepted (assumed)."
    ]
    if settings.tiny:
        claims += _tiny(context, settings, rows, notes)
    series = {
        f"{kind}, {count} draft tokens": [PlotPoint(row["batch"], row[key]) for row in rows if row["length"] == count]
        for kind, key in ((mixture.name, "efficiency"), (dense.name, "efficiency_dense"))
        for count in (min(settings.lengths), length)
    }
    columns = {"batch": "batch", "length": "draft tokens", "experts_alone": "experts", "experts_drafting": "drafting"}
    columns |= {"efficiency": "target efficiency", "efficiency_dense": "dense", "speedup": "speed-up"}
    columns |= {"speedup_dense": "dense", "tiny_experts": "tiny: experts", "tiny_efficiency": "tiny: efficiency"}
    columns |= {"tiny_predicted": "predicted", "tiny_fitted": "fitted"}
    plot = Plot("Target efficiency by batch (predicted)", "batch", "target efficiency", series, logarithmic=True)
    return Findings(rows, columns, claims, plot, notes)


def _costs(shape: ModelShape, settings: MoesdSettings) -> RooflineCosts:
    parallel = Parallel(settings.tensor_parallel)
    return RooflineCosts(Roofline(shape, find_hardware(settings.hardware), parallel=parallel))


def _gain(costs: RooflineCosts, count: int, batch: int, rate: float) -> float:
    """Expected speed-up of chains of ``count`` tokens, with drafts that take no time."""
    return tokens_per_round(rate, count) / Predictor(costs).verification(count, batch, _CONTEXT)


def _sparser(mixture: ModelShape, settings: MoesdSettings, batches: list[int]) -> Claim:
    """Batches at which the best draft gains, on a grid of equal ratios, for a sparser mixture of the same experts over
    the mixture itself."""
    most, widths = max(settings.lengths), []
    octaves = (4 * max(batches)).bit_length()
    grid = sorted({round(2 ** (step / 4)) for step in range(4 * octaves)})
    for active in (max(1, mixture.active_experts // 4), mixture.active_experts):
        costs = _costs(replace(mixture, active_experts=active), settings)
        probs = list(islice(one_rate(settings.rate), most))
        best = [
            max(speedups(probs, [costs.relative(count, batch, _CONTEXT) for count in range(1, most + 1)]))
            for batch in grid
        ]
        widths.append(sum(one > _GAINS for one in best))
    return by_formula(
        f"the sparser the mixture, the more batches gain {_GAINS:g}x (a quarter of the active experts)",
        widths[0] / max(1, widths[1]),
        1.0,
    )


def _tiny(context: StudyContext, settings: MoesdSettings, rows: list[dict[str, Any]], notes: list[str]) -> list[Claim]:
    """The model as a mixture: experts that batches use, against the formula; what forwards take, against a model."""
    from outpace.loading import load, load_from
    from outpace.studies.upcycled import MixtureForwards, balance, fitted_seconds, upcycle

    texts = _texts(context, longest := max(settings.lengths))
    wrapped = load(context.model_name, target="generic", dtype="float32")
    inner = wrapped.target.model  # type: ignore[attr-defined]
    mixtures = upcycle(inner, settings.experts, settings.active)
    balance(inner, mixtures, [token for one in texts for token in one][:_BALANCED])
    target = load_from(inner, wrapped.tokenizer, target="generic").target
    forwards = MixtureForwards(target, mixtures, texts, longest)
    try:
        batches = [one for one in sorted(set(settings.batches)) if one <= len(texts)]
        sizes = [
            (batch, length)
            for batch in batches
            for length in (0, *sorted(set(settings.lengths)))
            if batch * (1 + length) <= _MOST_ROWS
        ]
        with stage("timing a mixture", brief=True):
            cells = {(one.batch, one.length): one for one in forwards.cells(sizes, _REPEAT)}
        groups = [range(first, first + _GROUP) for first in range(0, len(texts) - _GROUP + 1, _GROUP)]
        shape = ModelShape("tiny", 1, 1, 1, 1, 1, 1, 1, experts=settings.experts, active_experts=settings.active)
        ratios = np.array([forwards.touched(one, 0) / shape.touched_experts(_GROUP) for one in groups])
    finally:
        forwards.close()
    # Batches are fitted and predicted by turns.
    known = [one for one in cells.values() if batches.index(one.batch) % 2 == 0]
    seconds = fitted_seconds(known, settings.experts, settings.active)
    errors = []
    for row in rows:
        alone, drafting = cells.get((row["batch"], 0)), cells.get((row["batch"], row["length"]))
        if alone is None or drafting is None:
            continue
        row["tiny_experts"], row["tiny_efficiency"] = drafting.touched, alone.seconds / drafting.seconds
        row["tiny_predicted"] = seconds(alone.rows) / seconds(drafting.rows)
        row["tiny_fitted"] = alone in known
        if not row["tiny_fitted"]:
            errors.append(abs(row["tiny_predicted"] / row["tiny_efficiency"] - 1.0))
    notes.append(
        f"Tiny mixture, measured: the MLPs of {wrapped.name} divided into {settings.experts} experts each, of which a "
        f"token uses {settings.active}; no weights are trained. Batches are different prompts with their answers, "
        f"whose next tokens are the drafts; float32, transformers' modules. The model of its times has a constant, a "
        f"part for each expert and one for each row, fitted to batches {', '.join(map(str, batches[::2]))}."
    )
    return [_as_many_experts(ratios), _predicted(np.array(errors))]


def _as_many_experts(ratios: Figures) -> Claim:
    says = f"batches of {_GROUP} different sequences use at least 90 % of the experts that the formula says"
    if not len(ratios):
        return undecided(says, None, "above 0.9")
    return above(says, float(ratios.mean()), resampled(len(ratios)) @ ratios / len(ratios), 0.9)


def _predicted(errors: Figures) -> Claim:
    """``errors``: of the efficiencies of batches that the model was not fitted to."""
    says = "the model tells the target efficiency of batches that it was not fitted to, within 10 % on average"
    if not len(errors):
        return undecided(says, None, "share of resamples in which it holds")
    return holds(says, resampled(len(errors)) @ errors / len(errors) <= _CLOSE)


def _texts(context: StudyContext, longest: int) -> list[tuple[int, ...]]:
    """Prompts with the model's answers to them, where these are long enough to draft from. Raises BadInput for none."""
    model = context.model
    plain = model.method("none")
    length = longest + 8
    requests = [
        Request(one, plain, SamplingParams(), length, model.eos_ids)
        for one in contexts_of(model, context.prompts, length)
    ]
    answers = known_answers(model.target, requests)
    close_answers(model.target, answers)
    found = [(*one.prompt, *one.tokens) for one in answers if len(one.tokens) > longest]
    if not found:
        raise BadInput(f"no answer has more than {longest} tokens: there is nothing to draft")
    return found

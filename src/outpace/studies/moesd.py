"""``moesd``: speculation with sparse mixtures of experts, by formula and on a tiny mixture (Huang et al. 2025, arXiv
2505.19645).

At a moderate batch the requests' tokens use nearly all experts anyway, so that verifying several tokens of each reads
hardly more weights. *Target efficiency* is the time of an autoregressive round over that of a round with K draft tokens
for each request: 1 where verifying is free. By formula: rooflines of a mixture and of a dense model. Measured: which
experts the hidden states of a real model use behind a router with random weights, and how long a layer of such experts
takes on this machine.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
from pydantic import Field

from outpace.controllers.predictor import Predictor, one_rate, speedups, tokens_per_round
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.validation import StrictModel
from outpace.engine.known_answers import close_answers, known_answers
from outpace.engine.request import Request
from outpace.simulate.hardware import find_hardware
from outpace.simulate.model_shape import ModelShape, find_shape
from outpace.simulate.roofline import Parallel, Roofline, RooflineCosts
from outpace.studies.claims import Claim, above, by_formula, resampled
from outpace.studies.decoded import contexts_of
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study

_CONTEXT = 512
_REPEAT = 5
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
    """Experts that hidden states of the model use, against the formula; and what a layer of them takes here."""
    import torch

    states = _hidden_states(context)
    hidden = states[0].shape[1]
    generator = torch.Generator().manual_seed(context.seed)
    router = torch.randn(hidden, settings.experts, generator=generator)
    chosen = [(one @ router).topk(settings.active, dim=1).indices for one in states]
    shape = ModelShape("tiny", 1, 1, 1, 1, 1, 1, 1, experts=settings.experts, active_experts=settings.active)
    sizes = (2, 4, 8, 16)
    ratios = np.array([np.mean([_used(one, size) / shape.touched_experts(size) for size in sizes]) for one in chosen])
    weights = resampled(len(ratios), context.seed)
    seconds = _layer_seconds(hidden, settings, torch.cat(states), torch.cat(chosen))
    for row in rows:
        few, many = row["batch"], row["batch"] * (1 + row["length"])
        if many in seconds and few in seconds:
            row["tiny_experts"] = float(np.mean([_used(one, few) for one in chosen]))
            row["tiny_efficiency"] = seconds[few] / seconds[many]
    notes.append(
        f"Tiny mixture, measured: {settings.experts} experts of the size of the model's hidden states (four times as "
        f"wide inside), {settings.active} for each token, router and experts with random weights, hidden states of "
        f"{context.used.get('name')} before its middle layer; tokens of a batch are neighbors in one answer."
    )
    return [
        above(
            "neighboring tokens use nearly as many experts as the formula of independent, equally likely choices says",
            float(ratios.mean()),
            weights @ ratios / len(ratios),
            0.9,
        )
    ]


def _hidden_states(context: StudyContext) -> list[Any]:
    """(tokens, hidden) of each prompt and its answer, before the model's middle layer."""
    model = context.model
    contexts = contexts_of(model, context.prompts, 32)
    layer = model.target.num_layers // 2
    plain = model.method("none")
    requests = [Request(one, plain, SamplingParams(), 32, model.eos_ids) for one in contexts]
    answers = known_answers(model.target, requests, [layer])
    try:
        return [one.hidden_states([layer])[layer].float().clone() for one in answers]
    finally:
        close_answers(model.target, answers)


def _used(chosen: Any, size: int) -> float:
    """Mean number of experts that ``size`` neighboring tokens use."""
    windows = [chosen[at : at + size] for at in range(0, max(1, len(chosen) - size + 1), size)]
    return float(np.mean([len(one.unique()) for one in windows]))


def _layer_seconds(hidden: int, settings: MoesdSettings, states: Any, chosen: Any) -> dict[int, float]:
    """Seconds of one layer of experts over 1, 2, 4, ... rows: each expert that is used runs its rows."""
    import torch

    generator = torch.Generator().manual_seed(1)
    up = torch.randn(settings.experts, hidden, 4 * hidden, generator=generator)
    down = torch.randn(settings.experts, 4 * hidden, hidden, generator=generator)

    def run(rows: int) -> None:
        found = torch.zeros(rows, hidden)
        for expert in chosen[:rows].unique().tolist():
            mine = (chosen[:rows] == expert).any(1)
            found[mine] += torch.nn.functional.silu(states[:rows][mine] @ up[expert]) @ down[expert]

    counts = sorted(
        {batch * more for batch in settings.batches for more in (1, *(1 + one for one in settings.lengths))}
    )
    best: dict[int, float] = {}
    for rows in [one for one in counts if one <= min(len(states), 128)]:
        for _ in range(_REPEAT):
            began = perf_counter()
            run(rows)
            best[rows] = min(best.get(rows, float("inf")), perf_counter() - began)
    return best

"""``configspec``: which draft model, in which precision, with which draft length, on a device before a cloud (Li et al.
2026, arXiv 2604.09722).

Acceptance is measured here: each draft model reads the target's answers once, and the accepted length of its chains
follows for every draft length (:mod:`outpace.engine.teacher_forcing`). Times are those of presets or, for ``measured``,
of this machine, and energy is power times time (:mod:`outpace.simulate.edge_cloud`). The Pareto front under goodput,
cost and energy, and whether their optima agree.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from outpace.core.errors import BadInput
from outpace.core.names import normalised
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.core.validation import StrictModel
from outpace.engine.known_answers import KnownAnswer, close_answers, known_answers
from outpace.engine.request import Request
from outpace.engine.teacher_forcing import chain_rounds, likelihood_ratios
from outpace.methods.named_weights import DRAFT_LM
from outpace.simulate.edge_cloud import OBJECTIVES, Configuration, Device, EdgeCloud, Figures, Link, best, pareto
from outpace.simulate.hardware import MEASURED, find_hardware
from outpace.simulate.model_shape import ModelShape
from outpace.simulate.roofline import Parallel, Roofline, RooflineCosts
from outpace.studies.claims import Claim, holds, resampled
from outpace.studies.decoded import contexts_of
from outpace.studies.draft_candidates import BITS, Candidate, candidates, distinct, shape_of
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study
from outpace.targets.base import Target
from outpace.targets.cost_protocol import Costs

_RESAMPLES = 200
"""Of the prompts: each is a search through all configurations."""


class ConfigspecSettings(StrictModel):
    """Settings of ``configspec``."""

    drafts: list[str] = Field(
        [DRAFT_LM, "smollm2:int8", "smollm2:bfloat16"],
        min_length=1,
        description="draft models as NAME, NAME:DTYPE or NAME:DTYPE=SHAPE; draft-lm is the shipped one",
    )
    shape: str | None = Field(
        None, description="shape of the target, for a preset as the cloud; None: that of the model"
    )
    device: str = Field(
        "snapdragon-8-gen-3", description=f"preset of the device that drafts; {MEASURED}: this machine, with watts"
    )
    watts: float | None = Field(None, gt=0, description="power of the device while it drafts; None: the preset's")
    cloud: str = Field("l4", description=f"preset of the cloud's devices; {MEASURED}: this machine verifies")
    tensor_parallel: int = Field(1, ge=1, description="devices of the cloud that share each layer")
    batch: int = Field(8, ge=1, description="users whose drafts the cloud verifies together")
    round_trip_ms: float = Field(30.0, ge=0, description="of the network")
    lengths: list[int] = Field(list(range(2, 13)), min_length=1, description="draft lengths that are compared")
    cost: Literal["rows", "seconds"] = Field("rows", description="what the cloud charges for: rows, or device-seconds")
    temperature: float = Field(0.0, ge=0, description="sampling temperature")
    max_new_tokens: int = Field(48, ge=2, description="tokens of an answer, at most")

    @property
    def drafts_here(self) -> bool:
        """Whether this machine is the device."""
        return normalised(self.device) == MEASURED

    @property
    def verifies_here(self) -> bool:
        """Whether this machine is the cloud."""
        return normalised(self.cloud) == MEASURED


@study(
    "configspec",
    title="Draft model, precision and length: goodput, cost and energy",
    paper="Li et al. 2026, arXiv 2604.09722",
)
def configspec(context: StudyContext, settings: ConfigspecSettings) -> Findings:
    """Measure acceptance of every draft model, and compare all configurations."""
    drafts, lengths = candidates(settings.drafts, measured=settings.drafts_here), sorted(set(settings.lengths))
    if lengths[0] < 1:
        raise BadInput("draft lengths must be at least 1")
    link = Link(round_trip=settings.round_trip_ms / 1e3)
    cloud = _cloud(context, settings)
    pair = EdgeCloud(cloud, link, devices=settings.tensor_parallel, batch=settings.batch, cost=settings.cost)
    watts = _watts(settings)
    rounds, tokens, loaded = _measured(context, settings, drafts, lengths, pair.context)
    drafts = distinct([replace(one, bits=each.bits) for one, each in zip(drafts, loaded, strict=True)])
    devices = [_device(settings, one, each, watts, pair.context) for one, each in zip(drafts, loaded, strict=True)]

    def figures(weights: NDArray[np.float64]) -> list[tuple[Configuration, Figures]]:
        """Of all configurations, with the prompts weighted."""
        return [
            (
                Configuration(drafts[at].name, drafts[at].bits, length),
                pair.figures(
                    devices[at], length, float(weights @ tokens[at] / (weights @ rounds[at, :, column])) - 1.0
                ),
            )
            for at in range(len(drafts))
            for column, length in enumerate(lengths)
        ]

    found = figures(np.ones(tokens.shape[1]))
    front = pareto([one for _, one in found])
    winners = {objective: best(found, objective) for objective in OBJECTIVES}
    drawn = [figures(one) for one in resampled(tokens.shape[1], context.seed)[:_RESAMPLES]]
    chosen = [{objective: best(one, objective) for objective in OBJECTIVES} for one in drawn]
    rows = [
        {
            "drafter": one.drafter,
            "bits": one.bits,
            "length": one.length,
            **each._asdict(),
            "pareto": kept,
            "best_for": ", ".join(name for name, winner in winners.items() if winner == one),
        }
        for (one, each), kept in zip(found, front, strict=True)
    ]
    series = {
        f"{one.name}, {one.bits} bits": [
            PlotPoint(row["length"], row["goodput"])
            for row in rows
            if (row["drafter"], row["bits"]) == (one.name, one.bits)
        ]
        for one in drafts
    }
    columns = {"drafter": "draft model", "bits": "bits", "length": "length", "goodput": "goodput (tok/s)"}
    unit = "rows/token" if settings.cost == "rows" else "device-s/token"
    columns |= {"cost": f"cost ({unit})", "energy": "energy (J/token)", "pareto": "Pareto", "best_for": "best for"}
    how = "from measured times" if settings.drafts_here and settings.verifies_here else "predicted"
    plot = Plot(f"Goodput by draft length ({how})", "draft tokens", "tokens per second of a user", series)
    notes = [
        f"Acceptance measured on {tokens.shape[1]} answers of {context.used.get('name')}; {_where(settings, watts)}, "
        f"{settings.batch} users, {settings.round_trip_ms:g} ms of network."
    ]
    if own := sorted({one.name for one in drafts if _is_target(context, settings, one)}):
        notes.append(
            f"{', '.join(own)} has the target's own sizes: nearly all of its drafts are accepted, and which draft "
            "model is best says nothing about smaller ones; name these with --setting drafts=NAME:DTYPE=SHAPE,..."
        )
    sizes = {(one.name, one.bits): one.bits * each.parameters for one, each in zip(drafts, loaded, strict=True)}
    return Findings(rows, columns, _claims(sizes, lengths, chosen), plot, notes)


class _Loaded(NamedTuple):
    """What is known of a draft model that was loaded: its ``bits``, how many ``parameters`` it has, and seconds of a
    forward with one row on this machine, where the settings ask for that."""

    bits: int
    parameters: int
    step: float | None


def _cloud(context: StudyContext, settings: ConfigspecSettings) -> Costs:
    """What the target's forwards take in the cloud."""
    if not settings.verifies_here:
        hardware = find_hardware(settings.cloud, measurable=True)
        parallel = Parallel(settings.tensor_parallel)
        return RooflineCosts(Roofline(_target_shape(context, settings), hardware, parallel=parallel))
    if settings.tensor_parallel > 1:
        raise BadInput("cloud=measured is this machine alone; leave out tensor_parallel, or name a preset")
    if context.model.target.costs.fixed:
        raise BadInput("cloud=measured needs measured costs, and this target has nominal ones; name a preset")
    return context.model.target.costs


def _target_shape(context: StudyContext, settings: ConfigspecSettings) -> ModelShape:
    """Of what verifies in the cloud."""
    return shape_of(context.model_name, settings.shape, "shape=NAME")


def _watts(settings: ConfigspecSettings) -> float:
    """Of the device, before anything is measured. Raises BadInput where no power is known."""
    if settings.drafts_here:
        if settings.watts is None:
            raise BadInput("device=measured: the power of this machine is not known; give --setting watts=NUMBER")
        return settings.watts
    device = find_hardware(settings.device, measurable=True)
    watts = settings.watts or device.watts
    if watts is None:
        raise BadInput(f"no power is stated for {device.name}, so its energy is not known; give watts, or name another")
    return watts


def _device(settings: ConfigspecSettings, one: Candidate, loaded: _Loaded, watts: float, context: int) -> Device:
    if loaded.step is not None:
        return Device(loaded.step, watts)
    assert one.shape is not None, "what is not timed has a shape"
    roofline = Roofline(one.shape, find_hardware(settings.device), bits=one.bits)
    return Device(RooflineCosts(roofline).seconds(1, context), watts)


def _is_target(context: StudyContext, settings: ConfigspecSettings, one: Candidate) -> bool:
    """Whether a draft model is what verifies, or has its sizes."""
    same = one.name == context.model_name
    if settings.verifies_here or one.shape is None:
        return same
    return same or one.shape == _target_shape(context, settings)


def _where(settings: ConfigspecSettings, watts: float) -> str:
    """Whose times these are."""
    device = "this machine (times measured" if settings.drafts_here else f"{settings.device} (times predicted"
    preset = f"{settings.tensor_parallel} x {settings.cloud} (predicted)"
    cloud = "this machine (measured)" if settings.verifies_here else preset
    return f"drafts on {device}, {watts:g} W) before {cloud}"


def _claims(
    sizes: Mapping[tuple[str, int], int], lengths: list[int], chosen: list[dict[str, Configuration]]
) -> list[Claim]:
    """``sizes``: bits of the weights of each draft model, by its name and precision."""
    small, large = min(sizes.values()), max(sizes.values())

    def size(objective: str, one: dict[str, Configuration]) -> int:
        return sizes[one[objective].drafter, one[objective].bits]

    def share(says: str, held: list[bool]) -> Claim:
        return holds(says, np.array(held))

    found = [
        share("goodput is highest with the smallest draft model", [size("goodput", one) == small for one in chosen]),
        share(
            f"cost is lowest with the shortest draft ({lengths[0]})",
            [one["cost"].length == lengths[0] for one in chosen],
        ),
        share("cost is lowest with the largest draft model", [size("cost", one) == large for one in chosen]),
        share(
            f"energy is lowest with the shortest draft ({lengths[0]})",
            [one["energy"].length == lengths[0] for one in chosen],
        ),
        share("energy is lowest with the smallest draft model", [size("energy", one) == small for one in chosen]),
        share(
            "no configuration is best for goodput, cost and energy at once",
            [len(set(one.values())) > 1 for one in chosen],
        ),
    ]
    # With one draft model there is nothing to choose from.
    return found if len(sizes) > 1 else [found[1], found[3], found[5]]


def _measured(
    context: StudyContext, settings: ConfigspecSettings, drafts: list[Candidate], lengths: list[int], rows: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[_Loaded]]:
    """Expected rounds (D, P, L) of every draft model, answer and length, the first ones included, tokens (D, P), and
    what the models (D,) are; ``rows`` of K/V are behind the forwards that are timed."""
    model = context.model
    params = SamplingParams(temperature=settings.temperature, seed=context.seed)
    plain = model.method("none")
    contexts = contexts_of(model, context.prompts, settings.max_new_tokens)
    requests = [Request(one, plain, params, settings.max_new_tokens, model.eos_ids) for one in contexts]
    answers = known_answers(model.target, requests)
    try:
        answers = [one for one in answers if len(one.tokens) > 1]
        if not answers:
            raise BadInput("the model ends every answer at once: there is nothing to draft")
        rounds = np.zeros((len(drafts), len(answers), len(lengths)))
        tokens = np.array([[float(len(one.tokens)) for one in answers]] * len(drafts))
        loaded = []
        with stage("scoring answers with draft models", total=len(drafts), unit="models") as at:
            for number, one in enumerate(drafts):
                ratios, known = _ratios(context, one, answers, rows if settings.drafts_here else None)
                loaded.append(known)
                for answer, each in enumerate(ratios):
                    for column, length in enumerate(lengths):
                        rounds[number, answer, column] = 1.0 + chain_rounds(each, length).rounds
                at.move(number + 1)
    finally:
        close_answers(model.target, answers)
    return rounds, tokens, loaded


def _ratios(
    context: StudyContext, one: Candidate, answers: Seq[KnownAnswer], rows: int | None
) -> tuple[list[list[float]], _Loaded]:
    """Likelihood ratios of the answers' tokens under a draft model, and what it is. Its forward is timed after ``rows``
    of K/V; None: it is not."""
    target: Target
    parameters = 0 if one.shape is None else one.shape.parameters
    if one.name == DRAFT_LM:
        if one.dtype is not None:
            raise BadInput(f"{DRAFT_LM} runs in the target's own precision; leave out ':{one.dtype}'")
        target = context.model.context(draft_model=DRAFT_LM).draft()
    else:
        model = context.load(one.name, one.dtype)
        target, parameters = model.target, parameters or int(model.info["parameters"])
        del model
        if target.vocab_size != context.model.target.vocab_size:
            raise BadInput(
                f"draft model '{one.name}' has {target.vocab_size} tokens and the target "
                f"{context.model.target.vocab_size}; choose one with the target's vocabulary"
            )
    if rows is not None and target.costs.fixed:
        raise BadInput(f"device=measured needs measured costs, and draft model '{one.name}' has nominal ones")
    step = None if rows is None else target.costs.seconds(1, min(rows, target.context_length // 2))
    found = likelihood_ratios(target, answers), _Loaded(BITS.get(target.dtype, one.bits), parameters, step)
    del target
    gc.collect()  # its weights, before the next one is loaded
    return found

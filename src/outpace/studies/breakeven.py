"""``breakeven``: at how many users speculation stops paying, for models of 7 to 405 billion parameters on presets.

Predictions: rooflines, and acceptance rates that are either assumed (settings) or those of the methods of a trace,
which another model was recorded with. What drafts of such a method take follows from its family: nothing for lookups,
a layer and the LM head for each draft token of a head of the EAGLE family, and for a draft model what the shape in the
settings takes; methods of other families are left out. For every drafter the draft length that is best at the number of
users counts; drafts of 0 tokens are autoregressive decoding, so that no entry of a good controller would be below 1. So
the map shows the best length of at least one token: below 1 it is better not to draft.

The predictor is the one that decides while decoding (:mod:`outpace.controllers.predictor`; Leviathan et al. 2023, arXiv
2211.17192).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from outpace.controllers.predictor import Forecast, Predictor
from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel
from outpace.methods.registry import find
from outpace.simulate.acceptance import drafting_share, rates_of
from outpace.simulate.draft_times import ModelDrafts, looks_up
from outpace.simulate.hardware import Hardware, find_hardware
from outpace.simulate.model_shape import ModelShape, find_shape
from outpace.simulate.roofline import Parallel, Roofline, RooflineCosts
from outpace.studies.heat_map import HeatMap
from outpace.studies.registry import Findings, StudyContext, study
from outpace.traces.trace_format import read_trace

LOOKUP, HEAD, DRAFT_MODEL = "lookup", "head", "draft model"
"""What may draft."""
_FAMILIES = {"eagle": HEAD, "draft-model": DRAFT_MODEL, "gated": DRAFT_MODEL}
"""Of methods that draft with one network, a forward of it for each draft token."""
_SHARES = (1, 2, 4, 8, 16, 32)
"""Devices that share each layer: the fewest that hold the weights and the K/V of the users."""


class BreakevenSettings(StrictModel):
    """Settings of ``breakeven``."""

    models: list[str] = Field(
        ["qwen2.5-7b", "llama-3.1-8b", "qwen2.5-32b", "llama-3.1-70b", "llama-3.1-405b"],
        min_length=1,
        description="shapes of the targets",
    )
    hardware: list[str] = Field(["h100", "mi300x", "l40s", "xeon-8480"], min_length=1, description="presets")
    users: list[int] = Field([1, 3, 10, 30, 100, 300, 1000], min_length=1, description="requests decoded at once")
    bits: int = Field(16, description="bits of a weight")
    context: int = Field(1024, ge=0, description="tokens in the K/V of each request")
    lookup: float = Field(0.5, ge=0, le=1, description="assumed acceptance rate of a method that looks drafts up")
    head: float = Field(0.75, ge=0, le=1, description="assumed acceptance rate of a head of one layer")
    draft_model: float = Field(0.8, ge=0, le=1, description="assumed acceptance rate of a draft model")
    draft_shape: str = Field("llama-3.2-1b", description="shape of the draft model")
    trace: str = Field("", description="trace whose acceptance rates, by depth, are taken for its methods instead")
    longest: int = Field(8, ge=1, le=32, description="draft tokens, at most")


class _Drafter(NamedTuple):
    """``kind``: what drafts, which tells what a draft takes; ``probs``: path acceptance probabilities; ``share`` of the
    rounds in which it drafts anything."""

    kind: str
    probs: list[float]
    share: float = 1.0


@study(
    "breakeven",
    title="At how many users speculation stops paying (predicted)",
    paper="Leviathan et al. 2023, arXiv 2211.17192",
)
def breakeven(context: StudyContext, settings: BreakevenSettings) -> Findings:
    """The best speed-up of every drafter on every model, preset and number of users."""
    if min(settings.users) < 1:
        raise BadInput("users must be at least 1")
    drafters, origin = _drafters(settings)
    users = sorted(set(settings.users))
    rows: list[dict[str, Any]] = []
    for name in settings.hardware:
        hardware = find_hardware(name)
        for shape in map(find_shape, settings.models):
            for drafter, each in drafters.items():
                places = {one: _placed(shape, hardware, each.kind, settings, one) for one in users}
                gains = {
                    one: None if placed is None else _best(placed, each, one, settings)
                    for one, placed in places.items()
                }
                paying = [one for one, gain in gains.items() if gain is not None and gain[0] > 1.0]
                devices = {one: placed.parallel.tensor for one, placed in places.items() if placed is not None}
                rows.append(
                    {
                        "model": shape.name,
                        "hardware": _told(list(devices.values()), hardware),
                        "drafter": drafter,
                        "pays_up_to": max(paying, default=0) if devices else None,
                        "devices": {str(one): count for one, count in devices.items()},
                        **{f"users_{one}": gain[0] if gain else None for one, gain in gains.items()},
                        "lengths": {str(one): gain[1] if gain else None for one, gain in gains.items()},
                    }
                )
    columns = {"model": "model", "hardware": "devices", "drafter": "drafter", "pays_up_to": "most users with a gain"}
    columns |= {f"users_{one}": str(one) for one in users}
    plot = HeatMap(
        "Predicted speed-up of the best draft length",
        "users",
        [str(one) for one in users],
        [f"{row['model']}, {row['drafter']}, {row['hardware']}" for row in rows],
        [[row[f"users_{one}"] for one in users] for row in rows],
    )
    notes = [
        f"Predictions, none of them measured: rooflines, weights of {settings.bits} bits, {settings.context} tokens of "
        f"context. Acceptance: {origin}. Devices are the fewest, of {_SHARES[-1]} at most, that hold the weights and "
        "the K/V of so many users; empty: they do not. Queues and prompts are not in it (`outpace simulate`)."
    ]
    return Findings(rows, columns, [], plot, notes)


def _drafters(settings: BreakevenSettings) -> tuple[Mapping[str, _Drafter], str]:
    """Drafters by name, and where their acceptance is from. Raises BadInput for a trace without drafts whose time can
    be told."""
    if not settings.trace:
        rates = {LOOKUP: settings.lookup, HEAD: settings.head, DRAFT_MODEL: settings.draft_model}
        told = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
        return {
            name: _Drafter(name, list(accumulate([rate] * settings.longest, mul))) for name, rate in rates.items()
        }, f"assumed rates ({told})"
    trace = read_trace(Path(settings.trace))
    found, left_out = {}, []
    for method, requests in trace.by_method().items():
        rates_by_depth = rates_of(requests)
        if not rates_by_depth:
            continue
        if (kind := _kind(method)) is None:
            left_out.append(method)
            continue
        more = [rates_by_depth[-1]] * settings.longest
        probs = list(accumulate((rates_by_depth + more)[: settings.longest], mul))
        found[method] = _Drafter(kind, probs, drafting_share(requests))
    untold = f"what drafts of {', '.join(left_out)} take is not known" if left_out else ""
    if not found:
        raise BadInput(untold or f"no method of the trace {settings.trace} drafted anything")
    origin = f"of a trace of {trace.header.model_name}, assumed for all models"
    return found, f"{origin}; left out, since {untold}" if untold else origin


def _kind(method: str) -> str | None:
    """What drafts for a method of a trace; None where that is not one network, or not known here."""
    try:
        return LOOKUP if looks_up(method) else _FAMILIES.get(find(method).family)
    except BadInput:  # of another package
        return None


def _told(devices: list[int], hardware: Hardware) -> str:
    """How many devices, of few users and of many."""
    if not devices:
        return f"more than {_SHARES[-1]} x {hardware.name}"
    few, many = min(devices), max(devices)
    return f"{few} x {hardware.name}" if few == many else f"{few} to {many} x {hardware.name}"


def _placed(
    shape: ModelShape, hardware: Hardware, kind: str, settings: BreakevenSettings, users: int
) -> Roofline | None:
    """The model on the fewest devices that hold it, and its draft model, with the K/V of so many users; None where 32
    do not."""
    tokens = users * settings.context
    beside = 0.0
    if kind == DRAFT_MODEL:
        draft = find_shape(settings.draft_shape)
        beside = draft.parameters * settings.bits / 8 + tokens * draft.kv_bytes()
    for devices in _SHARES:
        if shape.heads % devices:
            continue
        roofline = Roofline(shape, hardware, settings.bits, parallel=Parallel(devices))
        try:
            if roofline.kv_capacity >= tokens * roofline.kv_bytes_per_token + beside:
                return roofline
        except BadInput:
            continue
    return None


def _best(placed: Roofline, drafter: _Drafter, users: int, settings: BreakevenSettings) -> tuple[float, int]:
    """The best speed-up of drafts of at least one token, and their length."""
    costs = RooflineCosts(placed)
    draft = _draft_roofline(placed, drafter.kind, settings)
    predictor = Predictor(costs) if draft is None else Predictor(costs, ModelDrafts(draft).beside(costs))
    found = []
    for length in range(1, settings.longest + 1):
        spent = length * predictor.drafting.level(1, users, settings.context)
        tokens, steps = predictor.forecast(drafter.probs[:length], drafted=spent, batch=users, context=settings.context)
        share = drafter.share  # the other rounds are autoregressive
        found.append((Forecast(1.0 + share * (tokens - 1.0), 1.0 + share * (steps - 1.0)).speedup, length))
    return max(found)


def _draft_roofline(placed: Roofline, kind: str, settings: BreakevenSettings) -> Roofline | None:
    """What drafts; None where drafts take no time. A network drafts on the target's devices."""
    if kind == HEAD:
        return replace(placed, shape=replace(placed.shape, name=HEAD, layers=1))
    if kind == DRAFT_MODEL:
        shape = find_shape(settings.draft_shape)
        devices = max(one for one in _SHARES if shape.heads % one == 0 and one <= placed.parallel.tensor)
        return replace(placed, shape=shape, parallel=Parallel(devices))
    return None

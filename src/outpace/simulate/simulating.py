"""simulate(): from a trace and the name of a machine to what each of the trace's methods would do there."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.bench.results import plain_figures
from outpace.core.errors import BadInput
from outpace.core.names import normalised, unknown
from outpace.core.version import __version__
from outpace.engine.scheduler import Limits
from outpace.simulate.acceptance import Acceptance, Beside, Rates, Recorded, Undrafted, drafting_share, rates_of
from outpace.simulate.draft_times import DraftTimes, FreeDrafts, ModelDrafts, RecordedDrafts, looks_up
from outpace.simulate.hardware import MEASURED
from outpace.simulate.load import Load, Users, as_recorded, poisson
from outpace.simulate.machine_choice import preset_machine, this_machine
from outpace.simulate.machines import Machine, MeasuredMachine, RooflineMachine
from outpace.simulate.model_shape import find_shape
from outpace.simulate.roofline import Roofline
from outpace.simulate.simulation import FORWARDS, Outcome, simulate_requests
from outpace.simulate.simulation_report import SimulationReport
from outpace.simulate.simulation_settings import FREE, HEAD, Settings
from outpace.traces.trace_format import Trace, TracedRequest, read_trace

if TYPE_CHECKING:
    from outpace.engine.round_overhead import RoundOverhead
    from outpace.model import Model


_ALIKE = 1.5
"""Rounds with so many times as many requests are not of about the same size."""


def simulate(
    trace: str | Path | Trace,
    hardware: str,
    settings: Settings | None = None,
    *,
    load_model: Callable[[str], Model] | None = None,
    calibration: Seq[Trace] | None = None,
    overhead: RoundOverhead | None = None,
    forwards: int = FORWARDS,
    on_step: Callable[[int], None] | None = None,
) -> SimulationReport:
    """What every method of a trace would do on a machine.

    ``trace``: a file that ``outpace bench`` or ``outpace serve`` wrote with ``--trace``. ``hardware``: a preset, or
    "measured": this machine, by the cost table of the trace's model, which ``load_model`` loads (needed only then).
    ``calibration``: traces of servers on it, from which follows what a server adds to rounds (None: the trace itself,
    where a server wrote it). ``overhead``: what rounds take beside their forward there; None: it is measured.
    ``forwards``: at most, of each method; ``on_step``: called with the number of forwards now and then.

    Raises BadInput for files that are no traces, unknown names, models that do not fit the hardware, traces of another
    model, and methods whose drafts cost what nobody has said; MissingExtra without simpy.

    >>> from outpace.simulate.simulating import simulate                       # doctest: +SKIP
    >>> print(simulate("trace.jsonl", "h100"))                                 # doctest: +SKIP
    """
    wish = settings or Settings()
    found = trace if isinstance(trace, Trace) else read_trace(Path(trace))
    chosen = _chosen(found, wish.methods)
    if normalised(hardware) == MEASURED:
        machine: Machine = this_machine(found, wish, load_model, calibration, overhead)
    else:
        machine = preset_machine(found, hardware, wish)
    rows: list[dict[str, Any]] = []
    outcomes: list[Outcome] = []
    notes = [*found.notes, *_too_long(found, wish)]
    limits = Limits(max_batch=_max_batch(found, wish))

    def simulated(requests: Seq[TracedRequest], acceptance: Acceptance, drafts: DraftTimes) -> tuple[Outcome, str]:
        load, count = _load(found, requests, wish)
        outcome = simulate_requests(
            *(requests, acceptance, _holding(machine, drafts), drafts, load, limits),
            count=count,
            prefix_cache=wish.prefix_cache,
            hours=wish.hours,
            forwards=forwards,
            on_step=on_step,
        )
        return outcome, load.described

    for method, requests in chosen.items():
        acceptance = _acceptance(method, requests, wish)
        drafts = _drafts(requests, acceptance, machine, wish)
        outcome, load = simulated(requests, acceptance, drafts)
        outcomes.append(outcome)
        about = {"acceptance": acceptance.described, "drafting": drafts.described, "load": load}
        row = {"method": method, **about, "max_batch": limits.max_batch, **outcome.public()}
        if "none" not in chosen:
            row["baseline"] = simulated(requests, Undrafted(), FreeDrafts())[0].public()
        rows.append(row)
        if isinstance(drafts, ModelDrafts) and isinstance(acceptance, Recorded):
            notes += _unknown_levels(method, [one for one in requests if one.method not in drafts.free])
        if isinstance(drafts, RecordedDrafts):
            notes += _other_batches(method, requests, outcome.public()["mean_batch"])
        notes += [f"{method}: {note}" for note in outcome.notes]
    _add_speedups(rows)
    result = {
        "version": __version__,
        "complete": True,
        "prediction": True,
        "trace": {
            "model": found.header.model_name,
            "written_by": found.header.written_by,
            "version": found.header.version,
            "load": {"kind": found.header.kind, "at_once": found.header.at_once},
            "requests": sum(map(len, found.by_method().values())),
        },
        "machine": machine.public(),
        "settings": _public(wish),
        "simulations": rows,
        "notes": notes,
    }
    return SimulationReport(plain_figures(result), tuple(outcomes))


def _public(wish: Settings) -> dict[str, Any]:
    shown = {name: getattr(wish, name) for name in Settings.__dataclass_fields__ if name != "parallel"}
    return shown | {"tensor_parallel": wish.parallel.tensor, "pipeline_parallel": wish.parallel.pipeline}


def _max_batch(trace: Trace, wish: Settings) -> int:
    """Where none is given: all users; at a rate, that of `outpace serve` at least, since a bench decodes one by one."""
    least = Limits().max_batch if wish.rate is not None else 1
    return wish.max_batch or wish.users or max(trace.header.at_once, least)


def _too_long(trace: Trace, wish: Settings) -> list[str]:
    """A note on requests that the trace's model has no room for."""
    most = trace.header.model.get("context_length")
    if wish.model is not None or not isinstance(most, int):
        return []
    count = sum(one.prompt_tokens + one.output_tokens > most for one in trace.requests)
    return [f"{count} of the requests are longer than the model's context of {most:,} tokens"] if count else []


def _chosen(trace: Trace, names: Seq[str]) -> dict[str, list[TracedRequest]]:
    """Requests that are simulated together, by the name of their row: in a bench each method by itself, in a server's
    traffic all that ran beside one another, unless methods are named. A server writes requests as they end; they are
    simulated in the order in which they arrived. Raises BadInput for a method that is not in the trace."""
    if trace.header.kind == "open":
        trace = replace(trace, requests=tuple(sorted(trace.requests, key=lambda one: one.arrival or 0.0)))
    found = trace.by_method()
    for name in names:
        if name not in found:
            raise unknown("method of this trace", name, list(found))
    if names:
        return {name: found[name] for name in names}
    if trace.header.kind == "open":
        return {" + ".join(found): [one for one in trace.requests if len(one.rounds)]}
    return found


def _acceptance(method: str, requests: Seq[TracedRequest], wish: Settings) -> Acceptance:
    if wish.draft_length is None or {one.method for one in requests} == {"none"}:
        return Recorded()
    if wish.rates:
        return Beside(Rates(wish.rates, wish.draft_length, wish.seed))
    rates = rates_of(requests)
    if not rates:
        raise BadInput(f"--draft-length: '{method}' drafted nothing in this trace, so its acceptance is not known")
    origin, often = "the acceptance rates of the trace, by depth", drafting_share(requests)
    return Beside(Rates(rates, wish.draft_length, wish.seed, origin, often))


def _drafts(requests: Seq[TracedRequest], acceptance: Acceptance, machine: Machine, wish: Settings) -> DraftTimes:
    """What its drafts take. Raises BadInput where a network drafts of which nobody has said what it costs."""
    name, methods = wish.draft_model, sorted({one.method for one in requests} - {"none"})
    if not methods or name == FREE:
        return FreeDrafts()
    if isinstance(machine, MeasuredMachine):
        if name is not None:
            raise BadInput(f"--draft-model: on hardware '{MEASURED}' drafts take what they took in the trace")
        if not isinstance(acceptance, Recorded):
            raise BadInput(f"--draft-length: on hardware '{MEASURED}' only the trace's own drafts have a measured time")
        return RecordedDrafts()
    assert isinstance(machine, RooflineMachine)
    target = machine.roofline
    shape = None
    if name is not None:
        shape = replace(target.shape, name=HEAD, layers=1) if name == HEAD else find_shape(name)
    free = frozenset(one.method for one in requests if looks_up(one.method))
    network = next((one for one in methods if one not in free), None)
    if network is None:
        return FreeDrafts()
    if shape is None:
        raise BadInput(
            f"method '{network}' drafts with a network, whose cost is not in the trace: give --draft-model SHAPE, "
            "'head' (one layer and the LM head of the model) or 'free'; or choose others with --method"
        )
    bits = wish.draft_bits or target.bits
    return ModelDrafts(Roofline(shape, target.hardware, bits, wish.kv_bits, efficiency=wish.efficiency), free)


def _holding(machine: Machine, drafts: DraftTimes) -> Machine:
    """The machine with a draft model in its memory. Embedding and LM head of a head are the target's."""
    if not isinstance(drafts, ModelDrafts) or not isinstance(machine, RooflineMachine):
        return machine
    draft = drafts.roofline
    shape = replace(draft.shape, vocabulary=0) if draft.shape.name == HEAD else draft.shape
    return machine.beside(draft, shape.parameters * draft.bits / 8)


def _other_batches(method: str, requests: Seq[TracedRequest], simulated: float | None) -> list[str]:
    """A note where rounds have far more or fewer requests than those whose drafts were timed."""
    rounds = [one.rounds for one in requests]
    batches = [size for one in rounds for size, took in zip(one.batch, one.draft_ms, strict=False) if took]
    if not batches or not simulated:
        return []
    timed = sum(batches) / len(batches)
    if 1 / _ALIKE <= simulated / timed <= _ALIKE:
        return []
    return [
        f"{method}: drafts take as long as recorded, in rounds of {timed:.1f} requests; the simulated rounds have "
        f"{simulated:.1f}"
    ]


def _unknown_levels(method: str, requests: Seq[TracedRequest]) -> list[str]:
    """A note where a trace does not tell trees from chains."""
    if all(one.rounds.levels or max(one.rounds.drafted, default=0) < 2 for one in requests):
        return []
    return [
        f"{method}: the trace was written without the levels of drafts, so that a tree takes a forward for each of its "
        "tokens here, as a chain does; record it again"
    ]


def _load(trace: Trace, requests: Seq[TracedRequest], wish: Settings) -> tuple[Load, int | None]:
    """The load, and how many requests it has; None: those of the trace, each once."""
    if wish.rate is not None:
        count = wish.requests or len(requests)
        return poisson(wish.rate, count, wish.seed), count
    if wish.users is not None:
        return Users(wish.users, wish.pause, wish.seed), wish.requests or max(len(requests), 4 * wish.users)
    load = as_recorded(trace, [one.arrival for one in requests])
    if wish.requests is not None and not isinstance(load, Users):
        raise BadInput("--requests needs --users or --rate: the arrivals of a trace are as many as it has")
    return load, wish.requests


def _add_speedups(rows: list[dict[str, Any]]) -> None:
    """Of tokens per second in all, and of each request's, beside autoregressive decoding: the row "none", or each row's
    own requests without drafts."""
    none = next((row for row in rows if row["method"] == "none"), None)
    for row in rows:
        plain = none or row["baseline"]
        for name, figure in (("throughput_gain", "tokens_per_second"), ("speedup", "user_tokens_per_second")):
            row[name] = row[figure] / plain[figure] if plain[figure] and row[figure] else None

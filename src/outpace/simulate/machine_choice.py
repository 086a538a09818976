"""Which machine is simulated: a preset with the sizes of a model, or this one with the trace's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING

from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.turns import ROUNDS
from outpace.engine.round_overhead import RoundOverhead, measure_overhead
from outpace.simulate.hardware import MEASURED, find_hardware
from outpace.simulate.machines import MeasuredMachine, RooflineMachine
from outpace.simulate.model_shape import ModelShape, find_shape
from outpace.simulate.roofline import Roofline
from outpace.simulate.served_rounds import fit
from outpace.simulate.simulation_settings import Settings
from outpace.traces.trace_format import Trace

if TYPE_CHECKING:
    from outpace.model import Model


def preset_machine(trace: Trace, hardware: str, wish: Settings) -> RooflineMachine:
    """A preset. Raises BadInput for unknown hardware, and for a model that does not fit."""
    preset, shape = find_hardware(hardware, measurable=True), _shape(trace, wish)
    roofline = Roofline(shape, preset, wish.bits, wish.kv_bits, wish.parallel, wish.efficiency, wish.overhead_ms / 1e3)
    return RooflineMachine(roofline)


def _shape(trace: Trace, wish: Settings) -> ModelShape:
    """The shape that is simulated. Raises BadInput for one of another model than the trace's, unless that is meant."""
    own = trace.header.model_name
    if wish.model is None:
        try:
            return find_shape(own)
        except BadInput:
            raise BadInput(
                f"the sizes of the trace's model '{own}' are not among the presets; give them with --model, a preset "
                "or the path of a config.json"
            ) from None
    shape = find_shape(wish.model)
    if not wish.transfer and not _same(trace, shape):
        raise BadInput(
            f"the trace was recorded with '{own}', and not with {shape.name}, which may accept more or less; give "
            "--transfer to assume that it accepts as much"
        )
    return shape


def _same(trace: Trace, shape: ModelShape) -> bool:
    """Whether a shape has the sizes of the trace's model, as far as its header tells them."""
    about = trace.header.model
    sizes = {"num_layers": shape.layers, "hidden_size": shape.hidden, "vocab_size": shape.vocabulary}
    known = {name: size for name, size in sizes.items() if name in about}
    return bool(known) and all(about[name] == size for name, size in known.items())


def this_machine(
    trace: Trace,
    wish: Settings,
    load_model: Callable[[str], Model] | None,
    calibration: Seq[Trace] | None,
    overhead: RoundOverhead | None,
) -> MeasuredMachine:
    """This machine. Raises BadInput for a model that is not the trace's, and for what one machine is not."""
    if load_model is None:
        raise BadInput(f"hardware '{MEASURED}' needs the model itself; nobody loads one here")
    if wish.parallel.devices > 1:
        raise BadInput(f"hardware '{MEASURED}' is one machine: leave out --tensor-parallel and --pipeline-parallel")
    own = trace.header.model_name
    model = load_model(wish.model or own)
    about, target = trace.header.model, model.target
    sizes = {"num_layers": target.num_layers, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    differing = [name for name, size in sizes.items() if about.get(name, size) != size]
    if differing and not wish.transfer:
        raise BadInput(
            f"the trace was recorded with '{own}', and '{model.name}' is another model ({', '.join(differing)} "
            "differ); give --transfer to assume that it accepts as much"
        )
    if target.costs.fixed:
        raise BadInput(f"hardware '{MEASURED}' reads measured costs; leave out --fixed-costs")
    bound = trace.header.settings.get("kv_bytes")
    if overhead is None:
        sampled = any(one.temperature > 0 for one in trace.requests)
        with ROUNDS:
            overhead = measure_overhead(target, SamplingParams(temperature=1.0 if sampled else 0.0, seed=0))
    capacity = bound if isinstance(bound, int) else None
    machine = MeasuredMachine(target.costs, target.kv_bytes_per_token, capacity, overhead)
    known = [trace] if calibration is None else calibration
    written = [one.requests for one in known if one.header.kind == "open"]
    if written:
        machine.served = fit(written, machine.alone, machine.reading, machine.beside)
    return machine

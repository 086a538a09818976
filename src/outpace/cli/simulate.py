"""``outpace simulate``: a trace on other hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outpace.cli import options as opt
from outpace.cli.grouping import grouped
from outpace.cli.options import option
from outpace.cli.output import out, print_json
from outpace.cli.session import Hardware
from outpace.core.errors import BadInput, MissingExtra
from outpace.core.progress import stage

if TYPE_CHECKING:
    from outpace.model import Model

LOAD, MODEL, DEVICES = "Load", "Model", "Devices"


@grouped()
def simulate(
    trace: Annotated[
        Path | None, option(value="FILE", text="Trace that bench or serve wrote with --trace. [dim]\\[required][/]")
    ] = None,
    hardware: Annotated[
        str | None,
        option(
            value="NAME",
            text="A preset (h100, xeon-8480, snapdragon-8-gen-3, ...), or 'measured': this machine, by the costs that "
            "outpace has measured on it. [dim]\\[required][/]",
        ),
    ] = None,
    method: Annotated[
        str | None, option(value="A,B,C", text="Methods of the trace to simulate. [dim]\\[default: all][/]")
    ] = None,
    seed: Annotated[int, option(value="N", text="Seed of the random numbers.")] = 0,
    json: opt.Json = False,
    *,
    users: Annotated[
        int | None,
        option(value="N", panel=LOAD, text="Number of users, each with one request at a time, over and over."),
    ] = None,
    pause: Annotated[
        float,
        option(value="S", panel=LOAD, text="Mean seconds from an answer to its user's next request, with --users."),
    ] = 0.0,
    rate: Annotated[
        float | None, option(value="X", panel=LOAD, text="Requests per second, arriving at random.")
    ] = None,
    requests: Annotated[
        int | None, option(value="N", panel=LOAD, text="Number of requests, with --users or --rate.")
    ] = None,
    max_batch: Annotated[
        int | None,
        option(
            value="N", panel=LOAD, text="Requests decoded together, at most. [dim]\\[default: that of the trace][/]"
        ),
    ] = None,
    hours: Annotated[
        float, option(value="X", panel=LOAD, text="End after so much simulated time, whatever is left.")
    ] = 24.0,
    prefix_cache: Annotated[
        bool, option("--prefix-cache/--no-prefix-cache", panel=LOAD, text="Compute common beginnings of prompts once.")
    ] = True,
    model: Annotated[
        str | None,
        option(
            value="NAME",
            panel=MODEL,
            text="Sizes of the model: a preset (llama-3.1-70b, ...) or a config.json. [dim]\\[default: the trace's][/]",
        ),
    ] = None,
    transfer: Annotated[
        bool,
        option(
            "--transfer", panel=MODEL, text="Assume that --model accepts as much as the trace's model, a different one."
        ),
    ] = False,
    bits: Annotated[int, option(value="N", panel=MODEL, text="Bits of a weight: 32, 16, 8 or 4.")] = 16,
    kv_bits: Annotated[int, option(value="N", panel=MODEL, text="Bits of keys and values: 16 or 8.")] = 16,
    draft_model: Annotated[
        str | None,
        option(
            value="NAME",
            panel=MODEL,
            text="Size of the network that drafts, which sets its cost: a draft model's preset or config.json, "
            "'head' (one layer and the LM head) or 'free'. Lookup methods need none.",
        ),
    ] = None,
    draft_bits: Annotated[
        int | None,
        option(value="N", panel=MODEL, text="Bits of the draft model's weights. [dim]\\[default: --bits][/]"),
    ] = None,
    draft_length: Annotated[
        int | None,
        option(
            value="N",
            panel=MODEL,
            text="Draft chains of N tokens, accepted as often as in the trace, instead of playing its rounds again.",
        ),
    ] = None,
    acceptance: Annotated[
        str | None,
        option(value="A,B,C", panel=MODEL, text="Acceptance rates by depth for --draft-length, not the trace's."),
    ] = None,
    tensor_parallel: Annotated[int, option(value="N", panel=DEVICES, text="Devices that share each layer.")] = 1,
    pipeline_parallel: Annotated[
        int, option(value="N", panel=DEVICES, text="Groups of layers, one after another.")
    ] = 1,
    efficiency: Annotated[
        float, option(value="X", panel=DEVICES, text="Share of the peak and of the bandwidth that kernels reach.")
    ] = 1.0,
    overhead_ms: Annotated[
        float, option(value="X", panel=DEVICES, text="Milliseconds of a round that are not the devices' work.")
    ] = 0.0,
    machine: Hardware,
) -> None:
    """Predict what recorded traffic would take on other hardware, by a roofline and the server's own scheduler.

    Nothing is decoded: figures are predictions. The options of this machine matter with --hardware measured alone.
    """
    if trace is None:
        raise BadInput("give --trace FILE, which 'outpace bench --trace FILE' or 'outpace serve --trace FILE' writes")
    if hardware is None:
        from outpace.simulate.hardware import MEASURED, PRESETS

        raise BadInput(f"give --hardware NAME: {', '.join(PRESETS)}, or '{MEASURED}' for this machine")
    try:
        import simpy  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("outpace simulate", "simulate") from None
    from outpace.simulate.roofline import Parallel
    from outpace.simulate.simulating import simulate as simulated
    from outpace.simulate.simulation import FORWARDS
    from outpace.simulate.simulation_settings import Settings

    wish = Settings(
        model=model,
        transfer=transfer,
        bits=bits,
        kv_bits=kv_bits,
        draft_bits=draft_bits,
        parallel=Parallel(tensor_parallel, pipeline_parallel),
        efficiency=efficiency,
        overhead_ms=overhead_ms,
        methods=tuple(opt.names(method)),
        draft_length=draft_length,
        rates=_rates(acceptance),
        draft_model=draft_model,
        users=users,
        pause=pause,
        rate=rate,
        requests=requests,
        max_batch=max_batch,
        prefix_cache=prefix_cache,
        hours=hours,
        seed=seed,
    )

    def load(name: str) -> Model:
        machine.check(name)
        return machine.load(name)

    with stage("simulating", total=FORWARDS, unit="forwards", brief=True) as at:
        report = simulated(trace, hardware, wish, load_model=load, on_step=at.move)
    if json:
        print_json(report.result)
    else:
        report.print(out())


def _rates(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in opt.names(text))
    except ValueError:
        raise BadInput(f"--acceptance takes rates between 0 and 1, such as 0.8,0.7,0.6, not '{text}'") from None

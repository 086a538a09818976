"""``outpace doctor``: what is installed, how fast this machine is, and what to install."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rich.markup import escape
from rich.table import Table

from outpace.cli import options as opt
from outpace.cli.output import out, print_json
from outpace.core.errors import BadInput
from outpace.core.progress import stage

PRECISIONS = ("float32", "bfloat16", "float16", "int8")
PACKED = ("float32", "bfloat16", "int8")


ForgetCosts = Annotated[
    bool,
    opt.option("--forget-costs", text="Delete the measured costs of all models; they are measured again when needed."),
]


def doctor(json: opt.Json = False, forget_costs: ForgetCosts = False) -> None:
    """Check this machine: versions, threads, memory bandwidth, matmul throughput, models."""
    if forget_costs:
        _forget()
    with stage("measuring this machine", brief=True):
        found = examine()
    if json:
        print_json(found)
    else:
        _print(found)


def _forget() -> None:
    from outpace.targets import cost_table

    try:
        cost_table.forget()
    except OSError as error:
        raise BadInput(f"the costs in '{cost_table.folder()}' cannot be removed: {error.strerror}") from error


def examine() -> dict[str, Any]:
    """Everything that doctor reports."""
    import torch  # noqa: F401 - so that describe() can say how many threads it uses

    from outpace.core import machine
    from outpace.targets import cost_table, machine_limits

    peaks = {precision: round(machine.measure_matmul(precision), 1) for precision in PRECISIONS}
    limits = {precision: max(peaks[precision], machine_limits.kernel_products(precision)) for precision in PACKED}
    kernels, missing = _kernels()
    models, advice = _embedded()
    advice += missing
    if peaks["bfloat16"] < peaks["float32"]:
        advice.append("PyTorch's bfloat16 is slower than float32 here: with --target generic try --dtype float32")
    return {
        "machine": machine.describe(),
        "measured": {
            "memory_bandwidth_gb_per_second": round(machine_limits.measure_bandwidth(), 1),
            "matmul_gflop_per_second": peaks,
            "product_limit_gop_per_second": {name: round(rate, 1) for name, rate in limits.items()},
        },
        "fast_target": kernels,
        "costs": {"folder": str(cost_table.folder()), "models": len(list(cost_table.folder().glob("*.json")))},
        "models": models,
        "advice": advice,
    }


def _kernels() -> tuple[str | None, list[str]]:
    """What the fast target's kernels were compiled for, and what to do where there are none."""
    from outpace.targets.dense.binding import features
    from outpace.targets.dense.kernel_build import NotAvailable

    try:
        return features() or "portable", []
    except NotAvailable as error:
        return None, [f"the fast target is not available: {error}"]


def _embedded() -> tuple[list[dict[str, Any]], list[str]]:
    """The models that wheels carry, and how to install what is missing."""
    from outpace.models.source import EMBEDDED, resolve

    models: list[dict[str, Any]] = []
    advice = []
    for name in EMBEDDED:
        path = None
        try:
            path = resolve(name).location
        except BadInput as error:
            advice.append(str(error))
        models.append({"name": name, "found": path is not None, "path": path})
    return models, advice


def _print(found: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    here, measured = found["machine"], found["measured"]
    names = {"cpu": "processor", "usable_cpus": "usable CPUs", "threads": "threads used", "memory_gb": "memory, GiB"}
    for key, value in here.items():
        table.add_row(names.get(key, key), escape(str("-" if value is None else value)))
    table.add_row("", "")
    table.add_row("memory bandwidth", f"{measured['memory_bandwidth_gb_per_second']:.1f} GB/s")
    for precision, peak in measured["matmul_gflop_per_second"].items():
        table.add_row(f"PyTorch matmul {precision}", f"{peak:.0f} GOP/s")
    for precision, limit in measured["product_limit_gop_per_second"].items():
        table.add_row(f"fastest product {precision}", f"{limit:.0f} GOP/s")
    table.add_row("fast target", escape(found["fast_target"] or "-"))
    table.add_row("measured costs", f"{found['costs']['models']} models, in {escape(found['costs']['folder'])}")
    table.add_row("", "")
    for model in found["models"]:
        table.add_row(
            f"model {model['name']}", escape(Path(model["path"]).name) if model["found"] else "[yellow]not installed"
        )
    console = out()
    console.print(table)
    console.print()
    for line in found["advice"]:
        console.print(f"[yellow]![/] {escape(line)}", soft_wrap=True)
    if not found["advice"]:
        console.print("[green]ready[/]: outpace generate 'Why is the sky blue?' --explain")

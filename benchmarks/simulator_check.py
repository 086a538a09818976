"""Is the simulator right? ``outpace simulate --hardware measured`` beside real runs of ``outpace serve``.

    python benchmarks/simulator_check.py --out simulator.jsonl --models smollm2 MODEL.gguf=SMALL.gguf --max-minutes 100
    python benchmarks/simulator_check.py --out simulator.jsonl --table --page docs/simulate.md

A *cell* is a model, a method and a batch. For each, a server is started with ``--trace``; as many users as the batch
ask it the questions of the prompt file, each the next when the last is answered, and the server ends. From its trace
come the measured figures (tokens per second of the stretch in which all users were busy, and of each request the times
to the first token, per further token and to its end) and the simulation's input: the same requests with the same
rounds, by as many users. Around each run of a server forwards are timed (`machine_pace.py`): where other
users made the machine slower than it was when its costs were measured, all times of that run count as so much shorter
(column ``pace``). Measured beforehand: seconds of forwards by rows, sequences and contexts, and of reading
prompts (the cost table), and what rounds take beside them, with and without drafts (seconds of rounds in this process,
once for each model, kept beside the file of cells). Taken from the trace: what drafting took in each round. *Fitted*,
on two cells without drafts, of the smallest and the largest batch: what a server adds to rounds, between them and to
the reading of prompts (`simulate/served_rounds.py`), and the time from an answer to its user's next request. These two
cells are left out of the errors. Nothing is fitted to any other cell.

Methods are ``none``, ``pld``, ``sam``, and ``draft-model`` for a model with a draft model (MODEL=DRAFT) or ``eagle3``
for others. Each cell is appended to the file as a line when it is complete; cells that are there already are left out,
so that a run that was ended goes on; with other prompts, tokens, requests or threads it needs another file. The traces
are kept beside it: ``--again`` simulates all cells anew from them.
``--max-minutes`` ends after the cell in which that time is over. The table shows every cell, and the median error of
each figure over all cells with the share within 10 %, over several files with ``--beside`` (another model with fewer
requests). Exit code 1: a cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

import outpace
from cells import (
    CellRun,
    append_cell,
    cell_options,
    check_settings,
    digest_of,
    model_label,
    models_and_drafts,
    numbers,
    read_cells,
)
from machine_pace import at_pace, pace
from outpace.core.errors import BadInput
from outpace.core.files import write_atomically
from outpace.engine.round_overhead import RoundOverhead, measure_overhead
from outpace.methods.registry import find
from outpace.model import Model
from outpace.simulate.served_rounds import turnaround
from outpace.simulate.simulating import simulate
from outpace.simulate.simulation_settings import Settings
from outpace.traces.trace_format import Trace, TracedRequest, read_trace
from serving_load.client import Client
from serving_load.conversations import Conversation, questions
from serving_load.loads import closed
from serving_load.servers import NotStarted, Server

Cell = tuple[str, str, int]
"""Model, method, batch."""
FIGURES = ("tokens_per_second", "ttft_ms", "tpot_ms", "latency_ms")
CLOSE = 0.1
MARK, END = "<!-- simulator check -->", "<!-- end of simulator check -->"
_PATIENCE = 300.0


def served(options: argparse.Namespace, model: str, draft: str | None, method: str, batch: int, trace: Path) -> None:
    """Ask a server with ``batch`` users; it writes the trace. Raises NotStarted and RuntimeError."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "outpace", "serve", "--model", model, "--port", port, "--trace", str(trace)]
    command += ["--method", method, "--max-batch", str(batch), "--threads", str(options.threads)]
    command += ["--prefix-cache-bytes", "0"]  # the same questions come again, and would not be read again
    if method == "draft-model":
        command += ["--draft-model", draft or "draft-lm"]
    server = Server(f"{model} {method}", command, dict(os.environ), model, None, url)
    asked = _enough(questions(options.prompts), max(options.requests, 4 * batch))
    client = Client(url)

    def body(messages: list[dict[str, str]], name: str) -> dict[str, Any]:
        common = {"model": model, "messages": messages, "temperature": 0, "max_tokens": options.tokens}
        return common | {"stream": True, "stream_options": {"include_usage": True}}

    try:
        server.start(_PATIENCE)
        warm = closed(client, asked[:batch], body, batch, "warm")
        block = closed(client, asked, body, batch, "measured")
    finally:
        client.close()
        server.stop()
    errors = [one.error for one in (*warm.replies, *block.replies) if one.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")


def _enough(found: Sequence[Conversation], count: int) -> list[Conversation]:
    return [found[at % len(found)] for at in range(count)]


def _free_port() -> str:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def measured_part(path: Path, batch: int, slower: float = 1.0) -> Trace:
    """The trace without the requests of the warm-up, in the order of their arrival, with the times that a machine
    ``slower`` times as fast would have had."""
    whole = read_trace(path)
    ordered = sorted(whole.requests, key=lambda one: one.arrival or 0.0)
    return Trace(whole.header, tuple(at_pace(one, slower) for one in ordered[batch:]), whole.notes)


def figures_of(times: Sequence[tuple[float, float, float, int]], batch: int) -> dict[str, float]:
    """From (arrival, first token, end, tokens) of each request, in seconds of one clock.

    Tokens per second are those of the stretch from the first arrival until the first user has nothing left to ask; a
    request's tokens count for the share of its decoding that lies in it.
    """
    began = min(one[0] for one in times)
    ends = sorted(one[2] for one in times)
    until = ends[-batch]
    inside = 0.0
    for _, first, end, tokens in times:
        inside += tokens if end <= until else tokens * max(0.0, (until - first) / max(1e-9, end - first))
    later = [(end - first) / (tokens - 1) for _, first, end, tokens in times if tokens > 1]
    return {
        "tokens_per_second": inside / (until - began),
        "ttft_ms": 1e3 * mean(first - arrival for arrival, first, _, _ in times),
        "tpot_ms": 1e3 * mean(later),
        "latency_ms": 1e3 * mean(end - arrival for arrival, _, end, _ in times),
    }


def times_of(requests: Sequence[TracedRequest]) -> list[tuple[float, float, float, int]]:
    """As :func:`figures_of` takes them."""
    found = []
    for one in requests:
        assert one.arrival is not None
        assert one.first_token is not None
        assert one.seconds is not None
        found.append((one.arrival, one.arrival + one.first_token, one.arrival + one.seconds, one.output_tokens))
    return found


def beside(options: argparse.Namespace, model: str, what: str) -> Path:
    """A file about a model, kept beside the file of cells."""
    found: Path = options.out.with_suffix(f".{model_label(model)}-{what}")
    return found


def settings(options: argparse.Namespace, batches: Sequence[int]) -> dict[str, Any]:
    """What all cells, and what is measured beside them, depend on: times are fitted on the smallest and the largest
    batch."""
    said = {name: getattr(options, name) for name in ("tokens", "requests", "threads")}
    asked = [(one.opening, one.turns) for one in questions(options.prompts)]
    return said | {"prompts": digest_of(asked), "batches": [min(batches), max(batches)]}


def overhead_of(options: argparse.Namespace, model: Model, name: str, batches: Sequence[int]) -> RoundOverhead:
    """What rounds take beside their forwards: measured once, as is the cost table, while no server runs; at the
    table's pace."""
    path = beside(options, name, "overhead.json")
    if path.exists():
        return RoundOverhead(**json.loads(path.read_text(encoding="utf-8")))
    costs = model.target.costs
    for context in (16, 256, 1024):
        costs.seconds(128, min(context, model.target.context_length // 2))
    for number in batches:
        costs.even(number, number, 256)
    costs.reading(512)
    before = pace(model.target)
    found = measure_overhead(model.target)
    slower = mean((before, pace(model.target)))
    found = RoundOverhead(**{name: value / slower for name, value in asdict(found).items()})
    write_atomically(path, json.dumps(asdict(found)).encode())
    return found


def trace_of(
    options: argparse.Namespace, model: Model, name: str, draft: str | None, method: str, batch: int
) -> tuple[Trace, float]:
    """What a server wrote, without its warm-up, at the pace at which costs were measured; and how many times as long
    forwards took around it. Measured where it has not been, and kept beside the cells, so that they can be simulated
    again."""
    path = beside(options, name, f"{method}-{batch}.trace.jsonl")
    around = path.with_suffix(".pace.json")
    if not path.exists():
        written = path.with_suffix(".part")
        written.unlink(missing_ok=True)
        before = pace(model.target)
        served(options, name, draft, method, batch, written)
        write_atomically(around, json.dumps([before, pace(model.target)]).encode())
        written.rename(path)
    slower = mean(json.loads(around.read_text(encoding="utf-8")))
    return measured_part(path, batch, slower), slower


def cell(
    options: argparse.Namespace, model: Model, wanted: Cell, draft: str | None, batches: Sequence[int]
) -> dict[str, Any]:
    """Measure and simulate one cell."""
    name, method, batch = wanted
    overhead = overhead_of(options, model, name, batches)
    ends = sorted({min(batches), max(batches)})
    calibration = {one: trace_of(options, model, name, None, "none", one)[0] for one in ends}
    fitted = method == "none" and batch in calibration
    trace, slower = trace_of(options, model, name, draft, method, batch)
    requests = [one for one in trace.requests if len(one.rounds)]
    pause = pause_of(calibration, batch)
    settings = Settings(users=batch, pause=pause, requests=len(requests), max_batch=batch, prefix_cache=False)
    report = simulate(
        *(trace, "measured", settings),
        load_model=lambda _: model,
        calibration=list(calibration.values()),
        overhead=overhead,
    )
    outcome = report.simulated[0]
    predicted = [(one.arrived, one.first_token or 0.0, one.finished or 0.0, one.committed) for one in outcome.answered]
    return {
        "model": name,
        "method": method,
        "batch": batch,
        "requests": len(requests),
        "fitted": fitted,
        "pause": pause,
        "pace": slower,
        "machine": report.result["machine"],
        "measured": figures_of(times_of(requests), batch),
        "predicted": figures_of(predicted, batch),
        "version": outpace.__version__,
    }


def pause_of(calibration: Mapping[int, Trace], batch: int) -> float:
    """Seconds from an answer to its user's next request, between the batches of the traces by interpolation."""
    known = {size: turnaround(trace.requests, size) for size, trace in sorted(calibration.items())}
    return float(np.interp(batch, list(known), list(known.values())))


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """All cells and the errors over them, as Markdown; a model's by batch."""
    models = list(dict.fromkeys(one["model"] for one in cells))
    cells = sorted(cells, key=lambda one: (models.index(one["model"]), one["batch"]))
    lines = ["| model | method | batch | pace | " + " | ".join(f"{one}: measured, predicted" for one in FIGURES) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(FIGURES))
    for one in cells:
        name_of = f"{one['method']}{' (fitted)' if one['fitted'] else ''}"
        both = [f"{one['measured'][name]:.1f}, {one['predicted'][name]:.1f}" for name in FIGURES]
        lines.append(
            f"| {Path(one['model']).name} | {name_of} | {one['batch']} | {one['pace']:.2f} | {' | '.join(both)} |"
        )
    lines += ["", "| figure | median error | within 10 % |", "|---|---|---|"]
    others = [one for one in cells if not one["fitted"]]
    for name in FIGURES if others else ():
        errors = [abs(one["predicted"][name] / one["measured"][name] - 1.0) for one in others]
        close = sum(error <= CLOSE for error in errors) / len(errors)
        lines.append(f"| {name} | {100 * median(errors):.1f} % | {100 * close:.0f} % of {len(errors)} |")
    for one in {each["model"]: each for each in cells}.values():  # all cells of a model have the same machine
        for kind, words in (("Measured beforehand", "measured"), ("Fitted", "fitted")):
            lines += ["", *(f"{kind}, {Path(one['model']).name}: {each}." for each in one["machine"].get(words, ()))]
    if pauses := sorted({(Path(one["model"]).name, one["batch"], one["pause"]) for one in cells}):
        told = "; ".join(f"{name}, batch {batch}: {1e3 * pause:.1f} ms" for name, batch, pause in pauses)
        lines += ["", f"Fitted, from an answer to its user's next request: {told}."]
    return "\n".join(lines)


def page(path: Path, cells: Sequence[Mapping[str, Any]]) -> None:
    """Write the table between the marks of a page. Raises BadInput for a page without them."""
    before, mark, rest = path.read_text(encoding="utf-8").partition(MARK)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise BadInput(f"{path} has no '{MARK}' and '{END}' to write between")
    write_atomically(path, f"{before}{MARK}\n\n{table(cells)}\n\n{END}{after}".encode())


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cell_options(parser, "cell")
    parser.add_argument("--models", nargs="+", default=["smollm2"], metavar="MODEL[=DRAFT]")
    parser.add_argument("--methods", help="in place of the four of each model")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--prompts", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=24, help="per cell; at least four times the batch")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="simulate complete cells anew, from their traces")
    parser.add_argument("--page", type=Path, default=None, help="write the table there, between its marks")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="FILE", help="cells of other runs, for the table alone"
    )
    return parser.parse_args()


def measure(options: argparse.Namespace, done: list[dict[str, Any]]) -> int:
    """Measure the cells that are not among ``done``, and add them. Returns how many failed. Raises BadInput."""
    drafts, batches = models_and_drafts(options.models), numbers("--batches", options.batches)
    if options.requests < 1 or options.tokens < 2:
        raise BadInput("--requests must be at least 1, and --tokens at least 2")
    check_settings(options.out, settings(options, batches), drafts, done)
    if options.again:  # their traces are kept
        options.out.unlink(missing_ok=True)
        done.clear()

    def methods(name: str) -> list[str]:
        learned = "eagle3" if drafts[name] is None else "draft-model"
        return options.methods.split(",") if options.methods else ["none", "pld", "sam", learned]

    wanted = [(name, method, batch) for name in drafts for batch in batches for method in methods(name)]
    for one in wanted:
        find(one[1])
    run = CellRun(options.max_minutes)
    for each in done:
        run.known((each["model"], each["batch"]), each.get("seconds"))
    loaded: dict[str, Model] = {}
    failed = 0
    torch.set_num_threads(options.threads)

    for one in run.each(wanted, partial(_there, done), lambda one: (one[0], one[2])):
        name, method, batch = one
        began = time.monotonic()
        if name not in loaded:
            loaded[name] = outpace.load(name)
        try:
            found = cell(options, loaded[name], one, drafts[name], batches)
        except (NotStarted, RuntimeError) as error:
            print(f"{name} {method} {batch}: {error}", file=sys.stderr)
            failed += 1
            continue
        found["seconds"] = time.monotonic() - began
        done.append(found)
        append_cell(options.out, found)
        off = found["predicted"]["tokens_per_second"] / found["measured"]["tokens_per_second"] - 1.0
        print(f"{name} {method} {batch}: {100 * off:+.1f} % tokens per second", file=sys.stderr, flush=True)
    return failed


def _there(done: Sequence[Mapping[str, Any]], one: Cell) -> bool:
    return any((each["model"], each["method"], each["batch"]) == one for each in done)


def _others(path: Path, done: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cells of another run that are not among ``done``. Raises BadInput where there is no such file."""
    if not path.exists():
        raise BadInput(f"there is no file {path} of cells to show beside")
    return [one for one in read_cells(path) if not _there(done, (one["model"], one["method"], one["batch"]))]


def main() -> int:
    options = read_options()
    try:
        done = read_cells(options.out)
        failed = 0 if options.table else measure(options, done)
        for path in options.beside:
            done += _others(path, done)
        if options.page and done:
            page(options.page, done)
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; complete cells are kept, the same command goes on", file=sys.stderr)
        return 130
    if not done:
        print("no cell is complete", file=sys.stderr)
        return 2
    print(table(done))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Is the simulator right? ``outpace simulate --hardware measured`` beside real runs of ``outpace serve``.

    python benchmarks/simulator_check.py --out simulator.jsonl --models smollm2 MODEL.gguf
    python benchmarks/simulator_check.py --out simulator.jsonl --table

A *cell* is a model, a method and a batch. For each, a server is started with ``--trace``; as many users as the batch
ask it the questions of the prompt file, each the next when the last is answered, and the server ends. From its trace
come the measured figures (tokens per second of the stretch in which all users were busy, and of each request the times
to the first token, per further token and to its end) and the simulation's input: the same requests with the same
rounds, by as many users. Measured beforehand: seconds of forwards by rows, sequences and contexts, and of reading
prompts (the cost table), and what rounds take beside them (a second of rounds in this process). Taken from the trace:
what drafting took in each round. *Fitted*: four numbers that a server adds, on two cells without drafts, of the
smallest and the largest batch (`simulate/served_rounds.py`); they are left out of the errors. Nothing is fitted to any
other cell.

Each cell is appended to the file as a line when it is complete; cells that are there already are left out, so that a
run that was ended goes on. ``--cells N`` ends after N new ones. The table shows every cell, and the median error of
each figure over all cells with the share within 10 %. The cost table is measured before the first cell, in this
process, with no server running.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import outpace
from outpace.core.errors import BadInput
from outpace.model import Model
from outpace.simulate.simulating import Settings, simulate
from outpace.traces.trace_format import Trace, TracedRequest, read_trace
from serving_load.client import Client
from serving_load.conversations import Conversation, questions
from serving_load.loads import closed
from serving_load.servers import NotStarted, Server

FIGURES = ("tokens_per_second", "ttft_ms", "tpot_ms", "latency_ms")
CLOSE = 0.1
_PATIENCE = 300.0


def known(path: Path) -> list[dict[str, Any]]:
    """The cells that are complete."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def served(options: argparse.Namespace, model: str, method: str, batch: int, trace: Path) -> None:
    """Ask a server with ``batch`` users; it writes the trace. Raises NotStarted and RuntimeError."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "outpace", "serve", "--model", model, "--port", port, "--trace", str(trace)]
    command += ["--method", method, "--max-batch", str(batch), "--threads", str(options.threads)]
    command += ["--prefix-cache-bytes", "0"]  # the same questions come again, and would not be read again
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


def measured_part(path: Path, batch: int) -> Trace:
    """The trace without the requests of the warm-up, in the order of their arrival."""
    whole = read_trace(path)
    ordered = sorted(whole.requests, key=lambda one: one.arrival or 0.0)
    return Trace(whole.header, tuple(ordered[batch:]), whole.notes)


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


def calibration_file(options: argparse.Namespace, model: str, batch: int) -> Path:
    """The trace without drafts to which a model's cells are fitted, kept beside the file of cells."""
    found: Path = options.out.with_suffix(f".{Path(model).stem}-{batch}.trace.jsonl")
    return found


def calibrations(options: argparse.Namespace, model: str, batches: Sequence[int]) -> list[Trace]:
    """Traces of servers without drafts, of the smallest and of the largest batch; measured where there are none."""
    found = []
    for batch in sorted({min(batches), max(batches)}):
        path = calibration_file(options, model, batch)
        if not path.exists():
            written = path.with_suffix(".part")
            written.unlink(missing_ok=True)
            served(options, model, "none", batch, written)
            written.rename(path)
        found.append(measured_part(path, batch))
    return found


def cell(options: argparse.Namespace, model: Model, method: str, batch: int, batches: Sequence[int]) -> dict[str, Any]:
    """Measure and simulate one cell."""
    calibration = calibrations(options, model.name, batches)
    fitted = method == "none" and batch in (min(batches), max(batches))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        if fitted:
            path = calibration_file(options, model.name, batch)
        else:
            served(options, model.name, method, batch, path)
        trace = measured_part(path, batch)
    requests = [one for one in trace.requests if len(one.rounds)]
    settings = Settings(users=batch, requests=len(requests), max_batch=batch, prefix_cache=False)
    report = simulate(trace, "measured", settings, load_model=lambda _: model, calibration=calibration)
    outcome = report.simulated[0]
    predicted = [(one.arrived, one.first_token or 0.0, one.finished or 0.0, one.committed) for one in outcome.answered]
    return {
        "model": model.name,
        "method": method,
        "batch": batch,
        "requests": len(requests),
        "fitted": fitted,
        "machine": report.result["machine"],
        "measured": figures_of(times_of(requests), batch),
        "predicted": figures_of(predicted, batch),
        "version": outpace.__version__,
    }


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """All cells and the errors over them, as Markdown."""
    lines = ["| model | method | batch | " + " | ".join(f"{one}: measured, predicted" for one in FIGURES) + " |"]
    lines.append("|---|---|---|" + "---|" * len(FIGURES))
    for one in cells:
        name_of = f"{one['method']}{' (fitted)' if one['fitted'] else ''}"
        both = [f"{one['measured'][name]:.1f}, {one['predicted'][name]:.1f}" for name in FIGURES]
        lines.append(f"| {Path(one['model']).name} | {name_of} | {one['batch']} | {' | '.join(both)} |")
    lines += ["", "| figure | median error | within 10 % |", "|---|---|---|"]
    others = [one for one in cells if not one["fitted"]]
    for name in FIGURES if others else ():
        errors = [abs(one["predicted"][name] / one["measured"][name] - 1.0) for one in others]
        close = sum(error <= CLOSE for error in errors) / len(errors)
        lines.append(f"| {name} | {100 * median(errors):.1f} % | {100 * close:.0f} % of {len(errors)} |")
    return "\n".join(lines)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of complete cells, a line each")
    parser.add_argument("--table", action="store_true", help="print the table of what is there and measure nothing")
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--methods", default="none,pld,sam,eagle3")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--prompts", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=24, help="per cell; at least four times the batch")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cells", type=int, default=None, help="end after so many new cells")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    done = known(options.out)
    there = {(one["model"], one["method"], one["batch"]) for one in done}
    batches = [int(one) for one in options.batches.split(",")]
    wanted = [
        (model, method, batch) for model in options.models for batch in batches for method in options.methods.split(",")
    ]
    left = [] if options.table else [one for one in wanted if one not in there][: options.cells]
    loaded: dict[str, Model] = {}
    for name, method, batch in left:
        if name not in loaded:
            import torch

            torch.set_num_threads(options.threads)
            loaded[name] = outpace.load(name)
            costs = loaded[name].target.costs  # the cost table, while no server runs
            for context in (16, 256, 1024):
                costs.seconds(128, min(context, loaded[name].target.context_length // 2))
            for number in batches:
                costs.even(number, number, 256)
            costs.reading(512)
        try:
            found = cell(options, loaded[name], method, batch, batches)
        except (BadInput, NotStarted, RuntimeError) as error:
            print(f"{name} {method} {batch}: {error}", file=sys.stderr)
            continue
        done.append(found)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        off = found["predicted"]["tokens_per_second"] / found["measured"]["tokens_per_second"] - 1.0
        print(f"{name} {method} {batch}: {100 * off:+.1f} % tokens per second", file=sys.stderr, flush=True)
    if not done:
        print("no cell is complete", file=sys.stderr)
        return 2
    print(table(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())

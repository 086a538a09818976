"""How forwards scale with threads, and what a busy neighbour costs them.

    python benchmarks/threads.py --dtypes int4,bfloat16
    python benchmarks/threads.py --neighbours 2 --json threads.json

``scaling``: seconds of a forward on one thread / on ``--threads``. ``beside``: the rate beside ``--neighbours``
processes that compute all the time, divided by the rate without them. A fair share of a machine with C cores is about
1 - neighbours / C for a program that keeps all cores busy. The three conditions take turns, and the intervals (95 %)
are paired bootstraps over the turns. All forwards of a turn count, so a stopped thread shows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import outpace
from outpace.bench.statistics import Rate, speedup, speedup_interval
from outpace.core.tree import TokenTree
from outpace.targets.base import Target

ROWS = (1, 8, 16, 64)
SETTLING = 0.4
"""Seconds. A forward tries one thread more a quarter of a second after the last trial at the latest."""
_SPIN = "while True: pass"


@contextmanager
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes all the time, stopped for now."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN])
    process.send_signal(signal.SIGSTOP)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def rate(work: Callable[[], object], seconds: float) -> Rate:
    """(forwards, seconds) of as many as fit, after a while in which the number of threads settles."""
    began = perf_counter()
    while perf_counter() - began < SETTLING:
        work()
    count, began = 0, perf_counter()
    while perf_counter() - began < seconds:
        work()
        count += 1
    return count, perf_counter() - began


def measure(target: Target, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    sequence = target.sequence([(37 * i) % 20_000 + 100 for i in range(options.context)])
    target.prefill([sequence])
    tree = TokenTree.chain(range(200, 199 + rows))
    found: dict[str, list[Rate]] = {"one": [], "all": [], "beside": []}
    with ExitStack() as stack:
        others = [stack.enter_context(neighbour()) for _ in range(options.neighbours)]

        def tell(signal_number: int) -> None:
            for other in others:
                os.kill(other.pid, signal_number)

        for turn in range(options.turns):
            for condition in list(found)[turn % 3 :] + list(found)[: turn % 3]:
                torch.set_num_threads(1 if condition == "one" else options.threads)
                if condition == "beside":
                    tell(signal.SIGCONT)
                found[condition].append(rate(lambda: target.score([(sequence, tree)]), options.seconds))
                tell(signal.SIGSTOP)
    target.close(sequence.kv)
    return {
        "rows": rows,
        "ms": {
            name: 1e3 * sum(spent for _, spent in parts) / sum(count for count, _ in parts)
            for name, parts in found.items()
        },
        "scaling": speedup(found["all"], found["one"]),
        "scaling_ci95": speedup_interval(found["all"], found["one"]),
        "beside": speedup(found["beside"], found["all"]),
        "beside_ci95": speedup_interval(found["beside"], found["all"]),
    }


def interval(row: dict[str, Any], name: str) -> str:
    bounds = row[f"{name}_ci95"]
    return f"{row[name]:.2f}" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", default="bfloat16,int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each condition in a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    heads = f"{'1 thread':>11}{f'{options.threads} threads':>11}  {'scaling':<20}beside a busy neighbour"
    print(f"{'':<12}{'T':>4}{heads}")
    for dtype in options.dtypes.split(","):
        target = outpace.load(options.model, dtype=dtype).target
        for rows in ROWS:
            row = measure(target, rows, options)
            found.append({"precision": dtype, **row})
            ms = row["ms"]
            print(
                f"{dtype:<12}{rows:>4}{ms['one']:>8.1f} ms{ms['all']:>8.1f} ms  {interval(row, 'scaling'):<20}"
                f"{ms['beside']:.1f} ms, rate x {interval(row, 'beside')}",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

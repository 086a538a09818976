"""Servers under load, on one machine with the same prompts: ``outpace serve`` beside vLLM's and llama-cpp-python's.

    python benchmarks/serving.py --json out/serving.json
    python benchmarks/serving.py --servers outpace --methods auto,none --users 1,4,16 --requests 300
    python benchmarks/serving.py --model path/to/model.gguf --workloads traces --max-minutes 60
    python benchmarks/serving.py --markdown out/serving.json

Loads: closed loops of ``--users`` (each waits for an answer before the next question) and Poisson arrivals at
``--rates`` (requests per second; latencies begin when a request was due). Conversations: single questions, and 40
traces of several turns (chat, tools, code edits), whose answers are the server's own.

Blocks of requests are sent to all servers at once, which take turns: one runs for a fifth of a second while the others
are stopped, and all times are those of the server's own clock, which stands still meanwhile. Each of ``--methods`` has
a server of ours. Prompts are kept apart in the servers' prefix caches, so that only the turns of one conversation share
a beginning. Decoding is greedy. ITL is the time between two chunks with text, each of which may bring several tokens;
TPOT is the time per output token, by the server's own ``usage``. Goodput counts the answers with TTFT and TPOT within
``--goodput``.

The JSON object is rewritten after each block. Ctrl-C, SIGTERM and ``--max-minutes`` keep what was measured. Exit code
2: bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outpace.bench.peers.cpu_contention import NOTED
from outpace.bench.peers.stopping import Stopped, TimeLimit
from outpace.bench.peers.weights import DTYPES
from outpace.cli.bars import showing
from outpace.cli.interrupt import terminable
from outpace.cli.options import INTERRUPTED
from outpace.core import machine
from outpace.core.errors import BadInput
from outpace.core.names import unknown
from serving_load.asked import loads_of, rows_of
from serving_load.conversations import WORKLOADS
from serving_load.figures import Bounds
from serving_load.measuring import Results, measure
from serving_load.servers import SERVERS, Running, Server, check_free, speculation
from serving_load.tables import markdown


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for. Raises BadInput."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="embedded model, folder or GGUF file; several with commas")
    parser.add_argument("--servers", default=",".join(SERVERS), help="default: %(default)s")
    parser.add_argument(
        "--methods",
        default="auto,none,eagle3,eagle3:max_nodes=8",
        help="of outpace, as METHOD or METHOD:KEY=VALUE, whose length is then fixed; the first is compared with the "
        "others (default: %(default)s)",
    )
    parser.add_argument("--dtypes", default="bfloat16,int4", help="of outpace, a server each; vLLM has bfloat16")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: %(default)s")
    parser.add_argument("--prompts", type=Path, help="file of questions; default: the embedded ones")
    parser.add_argument("--users", default="1,2,4,8,16", help="closed loops; 0: none; default: %(default)s")
    parser.add_argument("--rates", default="1,2,4", help="Poisson arrivals of questions a second; 0: none")
    parser.add_argument("--requests", type=int, default=60, help="of each row under each load; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer; default: %(default)s")
    parser.add_argument("--ignore-eos", action="store_true", help="answers of exactly that length (not llama-cpp)")
    parser.add_argument("--goodput", default="1000,100", help="TTFT,TPOT in milliseconds; default: %(default)s")
    parser.add_argument("--threads", type=int, default=machine.usable_cpus(), help="of each server")
    parser.add_argument("--context", type=int, default=4096, help="of vLLM and llama-cpp; default: %(default)s")
    parser.add_argument("--max-minutes", type=float, help="stop after so many minutes and keep what was measured")
    parser.add_argument("--patience", type=float, default=900, help="seconds in which a server must answer first")
    parser.add_argument("--timeout", type=float, default=600, help="seconds without a byte after which a request fails")
    parser.add_argument("--serve-option", action="append", default=[], help="one more word for outpace serve; repeat")
    parser.add_argument("--vllm-python", help="default: the environment of make peers")
    parser.add_argument("--vllm-kv-gib", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="measure nothing; print the tables of such a JSON object")
    options = parser.parse_args(given)
    for name, known in (("servers", SERVERS), ("dtypes", DTYPES), ("workloads", WORKLOADS)):
        setattr(options, name, _words(getattr(options, name), name, known))
    options.model, options.methods = _words(options.model, "model"), _words(options.methods, "methods")
    for one in options.methods:
        speculation(one)
    options.users = [] if options.users == "0" else [int(one) for one in _numbers(options.users, "users", whole=True)]
    options.rates = [] if options.rates == "0" else _numbers(options.rates, "rates")
    bounds = _numbers(options.goodput, "goodput")
    if len(bounds) != 2:
        raise BadInput("--goodput takes two numbers of milliseconds, TTFT,TPOT, such as 1000,100")
    options.goodput = Bounds(*bounds)
    if not options.users and not options.rates:
        raise BadInput("--users 0 and --rates 0 leave no load; give one of them")
    for name in ("requests", "tokens", "threads", "context", "max_minutes", "patience", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
    return options


def _words(text: str, name: str, known: Sequence[str] | None = None) -> list[str]:
    found = list(dict.fromkeys(one.strip() for one in text.split(",") if one.strip()))
    for one in found:
        if known is not None and one not in known:
            raise unknown(name.rstrip("s"), one, known)
    if not found:
        raise BadInput(f"--{name} is empty")
    return found


def _numbers(text: str, name: str, *, whole: bool = False) -> list[float]:
    try:
        found = [float(int(one) if whole else float(one)) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one < math.inf for one in found):
        kind = "whole numbers" if whole else "numbers"
        raise BadInput(f"--{name} takes {kind} above 0, separated by commas, not '{text}'")
    return found


def run(options: argparse.Namespace) -> int:
    """Everything that was asked for; the exit code."""
    loads = loads_of(options)
    if not loads:
        raise BadInput("traces have closed loops alone, so that --users 0 leaves no load; add the workload questions")
    limit = TimeLimit(options.max_minutes)
    common = {
        "temperature": 0,
        "max_tokens": options.tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if options.ignore_eos else {}),
    }
    about: dict[str, Any] = {
        "machine": machine.describe(),
        "threads": options.threads,
        "tokens": options.tokens,
        "requests": options.requests,
        "goodput_bounds_ms": {"ttft": options.goodput.ttft, "tpot": options.goodput.tpot},
        "skipped": {},
        "notes": {},
    }
    results = Results(options.json, options.goodput, about)
    stopped, code = "", 0
    try:
        for model in options.model:
            rows, missing = rows_of(options, model)
            check_free(rows)
            with Running(rows, options.patience) as running:
                for name, why in (missing | running.skipped).items():
                    print(f"{name} is left out: {why}", file=sys.stderr)
                    about["skipped"][name] = why
                about["notes"] |= {one.name: one.note for one in _noted(running)}
                check_free(running.variants)
                print(f"{model}, {options.threads} threads, at most {options.tokens} tokens an answer; milliseconds")
                measure(results, model, loads, running, common, limit, options.timeout)
    except KeyboardInterrupt as reason:
        stopped = str(reason) or "Ctrl-C"
        code = 0 if isinstance(reason, Stopped) else INTERRUPTED
    results.write(complete=not stopped)
    _notes(results)
    if stopped:
        print(f"stopped by {stopped}; what was measured is kept", file=sys.stderr)
    return code


def _noted(running: Running) -> list[Server]:
    return [one.server for one in running.variants if one.server.note]


def _notes(results: Results) -> None:
    print()
    for name, why in results.about["notes"].items():
        print(f"{name}: {why}")
    others = results.contention.share
    if others is not None and others >= NOTED:
        print(f"other programs took {others:.0%} of the CPU time: compare the ratios, not the rates")


def _measured(path: Path) -> dict[str, Any]:
    """What an earlier run has written. Raises BadInput."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--markdown {path}: {error.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or "cells" not in found:
        raise BadInput(f"--markdown {path}: it is not what --json wrote")
    return found


def main(given: Sequence[str] | None = None) -> int:
    try:
        options = arguments(given)
        if options.markdown is not None:
            print(*markdown(_measured(options.markdown)), sep="\n")
            return 0
        with terminable(), showing():
            return run(options)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""How long the command line takes to answer: from the start of the process to the first byte on standard output.

    python benchmarks/first_token.py --repeat 7
    python benchmarks/first_token.py --model smollm2 --model folder/of/safetensors --methods none --json FILE

Every run is a process of its own, on caches that an earlier run has filled; one round before the measured ones fills
them (conversion, kernels, costs, compiled Python modules). The commands take turns. ``wall``: seconds to the first
byte, as a user waits. ``CPU``: processor seconds of the process and its threads until then, which other programs on
the machine disturb less. ``forward``: from the request to the first token in milliseconds, prefill included, as
``outpace generate`` reports it. Two rows are for comparison: an interpreter alone, and one that imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import psutil  # type: ignore[import-untyped, unused-ignore]

_FORWARD = re.compile(rb"first token after (\d+) ms")


@dataclass(frozen=True, slots=True)
class Run:
    """One process: seconds until its first byte on standard output, and milliseconds of the first forward."""

    wall: float
    cpu: float
    forward_ms: float | None


def run(arguments: Sequence[str], environment: dict[str, str]) -> Run:
    """Start a process and wait for its first byte and its end. Exits where it fails."""
    began = perf_counter()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        wall = perf_counter() - began
        times = psutil.Process(process.pid).cpu_times()
        _, error = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(arguments)}: {error.decode(errors='replace').strip().splitlines()[-1]}")
    found = _FORWARD.search(error)
    return Run(wall, times.user + times.system, float(found[1]) if found else None)


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """What is started, by the name of its row."""
    python, outpace = [sys.executable], [sys.executable, "-m", "outpace"]
    answer = "print(1, flush=True)"
    rows = {
        "an interpreter": [*python, "-c", answer],
        "import torch": [*python, "-c", f"import torch; {answer}"],
        "outpace --help": [*outpace, "--help"],
        "outpace methods": [*outpace, "methods"],
    }
    for model in options.model or ["smollm2"]:
        for method in options.methods.split(","):
            words = [*outpace, "generate", options.prompt, "--model", model, "--method", method]
            words += ["--max-new-tokens", str(options.tokens)]
            rows[f"generate, {Path(model).name}, {method}"] = [
                *words,
                *(["--threads", str(options.threads)] if options.threads else []),
            ]
    return rows


def row(runs: list[Run]) -> str:
    """Minimum and median of each figure."""
    shown = [f"{min(values):6.2f} {statistics.median(values):6.2f}" for values in _columns(runs)]
    forwards = [one.forward_ms for one in runs if one.forward_ms is not None]
    return "   ".join([*shown, f"{min(forwards):6.0f} {statistics.median(forwards):6.0f}" if forwards else ""])


def _columns(runs: list[Run]) -> tuple[list[float], list[float]]:
    return [one.wall for one in runs], [one.cpu for one in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", help="as for outpace generate; again for several (smollm2)")
    parser.add_argument("--methods", default="none,auto", help="methods that answer")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--tokens", type=int, default=4, help="length of the answer")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write every run too")
    options = parser.parse_args()
    # Modules of an installed package are compiled once; in a checkout only where this variable does not forbid it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    rows = commands(options)
    runs: dict[str, list[Run]] = {name: [] for name in rows}
    for turn in range(1 + options.repeat):
        for name, arguments in rows.items():
            found = run(arguments, environment)
            if turn:
                runs[name].append(found)
    width = max(map(len, rows))
    print(f"seconds to the first byte, {options.repeat} runs by turns: minimum and median")
    print(f"{'':{width}}  {'wall':>13}   {'CPU':>13}   {'forward, ms':>13}")
    for name, many in runs.items():
        print(f"{name:{width}}  {row(many)}")
    if options.json is not None:
        options.json.write_text(json.dumps({name: [asdict(one) for one in many] for name, many in runs.items()}))


if __name__ == "__main__":
    main()

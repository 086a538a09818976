"""How long loading takes and how much memory: the first time, and every time after.

    python benchmarks/load.py --repeat 3

Each load runs in a process of its own. The first loads begin with an empty cache, but for the compiled kernels: the
tokenizer and configuration of a GGUF file are converted, and the target is compared with plain PyTorch. ``imports`` is
the time until torch and outpace are imported, ``load`` that of ``outpace.load``, ``total`` both and the first token of
an answer; ``peak`` is the largest memory that the process had.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

_CHILD = """
import json, resource, sys, time
began = time.perf_counter()
import torch, outpace, outpace.api
name, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
if threads:
    torch.set_num_threads(threads)
imports = time.perf_counter() - began
model = outpace.load(name, dtype=dtype or None)
load = time.perf_counter() - began - imports
outpace.generate(model, "Hello", method="none", max_new_tokens=1)
total = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
print(json.dumps({"imports": imports, "load": load, "total": total, "peak": peak}))
"""
_KERNELS = "from outpace.targets.dense.kernel_build import library; library()"
_COLUMNS = {"imports": "s", "load": "s", "total": "s", "peak": "MB"}


def run(cache: str, code: str, *arguments: str) -> str:
    """What a process prints that runs ``code`` with this cache. Ends this one where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"OUTPACE_CACHE": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="embedded model, folder or GGUF file")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"first": [], "later": []}
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as cache:
            run(cache, _KERNELS)
            for many in runs.values():
                many.append(json.loads(run(cache, _CHILD, options.model, options.dtype or "", str(options.threads))))
    table = {
        which: {key: statistics.median(one[key] for one in many) for key in _COLUMNS} for which, many in runs.items()
    }
    if options.json:
        print(json.dumps({"medians": table, "runs": runs}))
        return
    print(f"{options.model}, dtype {options.dtype or 'default'}: medians of {options.repeat}")
    print(f"{'load':8}" + "".join(f"{f'{key}, {unit}':>12}" for key, unit in _COLUMNS.items()))
    for which, row in table.items():
        print(f"{which:8}" + "".join(f"{row[key]:12.{0 if key == 'peak' else 2}f}" for key in _COLUMNS))


if __name__ == "__main__":
    main()

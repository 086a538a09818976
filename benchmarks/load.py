"""How long loading takes: the first time (the GGUF file is converted) and every time after.

    python benchmarks/load.py --repeat 3

Each load runs in a process of its own; imports are timed apart and are not part of the load. The first loads convert
into empty caches that are removed afterwards. ``ready`` is everything until the model can decode; ``files`` is the
part up to that, without the target's self-check, which runs forwards through the model.
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
import json, sys, time
began = time.perf_counter()
import gguf, safetensors.torch, torch, transformers
import transformers.integrations.gguf, transformers.modeling_gguf_pytorch_utils
import transformers.models.auto.tokenization_auto, transformers.models.llama.modeling_llama
import outpace.targets.hf, outpace.models.gguf_cache, outpace.loading as loading
from transformers import AutoModelForCausalLM, AutoTokenizer
name, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
if threads:
    torch.set_num_threads(threads)
imports = time.perf_counter() - began
wrap, spent = loading._wrapped, 0.0
def timed(*args, **options):
    global spent
    began = time.perf_counter()
    try:
        return wrap(*args, **options)
    finally:
        spent = time.perf_counter() - began
loading._wrapped = timed
began = time.perf_counter()
loading.load(name, dtype=dtype or None)
ready = time.perf_counter() - began
print(json.dumps({"imports": imports, "files": ready - spent, "ready": ready}))
"""


def measure(name: str, dtype: str | None, threads: int, cache: str) -> dict[str, float]:
    command = [sys.executable, "-c", _CHILD, name, dtype or "", str(threads)]
    run = subprocess.run(
        command, env=os.environ | {"OUTPACE_CACHE": cache}, capture_output=True, text=True, check=False
    )
    if run.returncode:
        sys.exit(run.stderr.strip().splitlines()[-1])
    times: dict[str, float] = json.loads(run.stdout)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="embedded model or GGUF file")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as cache:
            for many in runs.values():
                many.append(measure(options.model, options.dtype, options.threads, cache))
    keys = ("imports", "files", "ready")
    table = {which: {key: statistics.median(one[key] for one in many) for key in keys} for which, many in runs.items()}
    ratios = {key: table["first"][key] / table["second"][key] for key in keys[1:]}
    if options.json:
        print(json.dumps({"median_seconds": table, "first_over_second": ratios, "runs": runs}))
        return
    print(f"{options.model}, dtype {options.dtype or 'default'}: seconds, median of {options.repeat}")
    print(f"{'load':8}" + "".join(f"{key:>10}" for key in keys))
    for which, row in table.items():
        print(f"{which:8}" + "".join(f"{row[key]:10.2f}" for key in keys))
    print(f"{'ratio':8}{'':10}" + "".join(f"{ratios[key]:9.1f}x" for key in keys[1:]))


if __name__ == "__main__":
    main()

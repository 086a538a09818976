"""The CUDA target on a GPU: captured, compared bit by bit, timed beside its rivals, certified. ``make gpu`` runs it.

    python benchmarks/gpu.py --json out/gpu.json
    python benchmarks/gpu.py --models path/to/model.gguf --stages capture,bits
    python benchmarks/gpu.py --vllm-python path/to/python

Stages: ``capture`` (each shape is captured and replayed, at what cost), ``bits`` (a replay computes the bits of the
same forward without one), ``forwards`` (milliseconds by rows, batch and context), ``certify`` (greedy answers of
methods are those of autoregressive decoding), ``rival`` (torch.compile beside the hand-made graphs; it compiles two
forwards for each number of rows, which takes minutes), ``decoding`` (tokens per second beside transformers and vLLM).
A stage that fails does not end the others. The JSON object is rewritten after each stage. Exit code 1: a stage failed
or found a difference; 2: this PyTorch sees no GPU, or there is no such model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from gpu_stages.requirements import missing

# cuBLAS chooses its algorithm by the size of its workspace: one size for all streams. Read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if lacking := missing():  # before anything that imports one of them
    named = " ".join(f"'{one}'" for one in lacking)
    print(f"{sys.executable} lacks packages that outpace needs: pip install {named}", file=sys.stderr)
    raise SystemExit(2)

import torch

from gpu_stages.bits import bits
from gpu_stages.captures import captures
from gpu_stages.certifying import certifying
from gpu_stages.decoding import decoding, methods
from gpu_stages.forwards import forwards
from gpu_stages.rival import rival
from gpu_stages.subject import RANDOM, Subject, load, random_folder
from outpace.core import machine
from outpace.core.errors import BadInput
from outpace.core.files import write_atomically
from outpace.models.source import resolve
from outpace.targets.dense.graphs import Capture, CudaCapture

STAGES = ("capture", "bits", "forwards", "certify", "rival", "decoding")


class Report:
    """The JSON object: what was found so far, on the disk after every stage."""

    def __init__(self, path: Path | None, device: str, dtype: str) -> None:
        self.path = path
        self.found: dict[str, Any] = {
            "complete": False,
            "machine": machine.describe() | {"cuda": torch.version.cuda, "device": device},
            "dtype": dtype,
            "models": {},
        }

    def put(self, model: str, stage: str, result: dict[str, Any]) -> None:
        """Enter a stage's result."""
        self.found["models"].setdefault(model, {})[stage] = result
        self.write()

    def write(self) -> None:
        """Replace the file by one that holds what was found so far."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self.found, indent=1).encode())

    def verdict(self) -> int:
        """Print a line for each stage; 0 where all of them passed."""
        good = True
        for model, stages in self.found["models"].items():
            for stage, result in stages.items():
                good &= result["passed"]
                print(f"{'ok    ' if result['passed'] else 'FAILED'} {model}, {stage}: {result['summary']}")
        return 0 if good else 1


def attempt(report: Report, model: str, stage: str, work: Callable[[], dict[str, Any]]) -> bool:
    """Run a stage; False where it failed. An error ends this stage alone, and the report names it."""
    print(f"\n{model}: {stage}", flush=True)
    began = perf_counter()
    try:
        result = work()
    except Exception as error:  # the next stage may still show something
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        result = {"passed": False, "summary": text, "trace": traceback.format_exc()}
        print(f"this stage failed: {text}", file=sys.stderr, flush=True)
    report.put(model, stage, result | {"seconds": perf_counter() - began})
    return bool(result["passed"])


def run_model(
    report: Report, label: str, options: argparse.Namespace, capture: Capture | None, shape: dict[str, Any] | None
) -> None:
    """All stages on one model."""
    name, drafting = label, [""]
    loaded: list[Subject] = []

    def loading() -> dict[str, Any]:
        nonlocal name
        if label == RANDOM:
            where = options.folder / f"{RANDOM}-{options.dtype}"
            name = random_folder(where, options.tokenizer_of, options.dtype, options.device, shape)
        subject = load(name, options.dtype, options.device, options.repeat, capture)
        drafting[:] = methods(subject.target)
        loaded.append(subject)
        about = subject.model.info
        summary = (
            f"{type(subject.target).__name__}, {about['dtype']}, {about['parameters'] / 1e6:.0f} million parameters"
        )
        shown = {key: value for key, value in about.items() if key != "location"}  # a report may be shared
        return {"passed": True, "summary": summary, "methods": drafting, **shown}

    if not attempt(report, label, "load", loading):
        return
    graphs = capture or CudaCapture(loaded[0].device)
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "capture": lambda: captures(loaded[0]),
        "bits": lambda: bits(loaded[0]),
        "forwards": lambda: forwards(loaded[0], options.megabytes),
        "certify": lambda: certifying(loaded[0], options.prompts),
        "rival": lambda: rival(loaded[0], graphs, options.rival_rows, options.backend),
    }
    for stage, work in works.items():
        if stage in options.stages:
            attempt(report, label, stage, work)
    loaded.clear()  # the processes that decode load it themselves, and need the room
    gc.collect()
    if options.device != "cpu":
        torch.cuda.empty_cache()
    if "decoding" in options.stages:
        sizes = {"prompts": options.prompts, "length": options.length}
        attempt(
            report,
            label,
            "decoding",
            lambda: decoding(name, drafting, options.dtype, options.device, vllm_python=options.vllm_python, **sizes),
        )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=f"smollm2,{RANDOM}", help=f"{RANDOM}: random weights of that shape")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeat", type=int, default=20, help="how often each time is taken")
    parser.add_argument("--prompts", type=int, default=14)
    parser.add_argument("--length", type=int, default=128, help="tokens of each answer that is timed")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument("--rival-rows", default="1,8,64", help="rows for which torch.compile compiles")
    parser.add_argument("--backend", default="inductor", help="what torch.compile compiles with")
    parser.add_argument("--megabytes", type=int, default=2048, help="read to measure the bandwidth")
    parser.add_argument("--tokenizer-of", default="smollm2", help=f"whose tokenizer {RANDOM} takes")
    parser.add_argument("--folder", type=Path, default=Path("out"), help=f"where {RANDOM} is written")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    options.stages, options.models = options.stages.split(","), options.models.split(",")
    try:
        options.rival_rows = [int(rows) for rows in options.rival_rows.split(",")]
    except ValueError:
        parser.error(f"--rival-rows takes whole numbers, such as 1,8,64, not {options.rival_rows}")
    unknown = [stage for stage in options.stages if stage not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]}; there are {', '.join(STAGES)}")
    return options


def no_gpu(device: str) -> str | None:
    """Why nothing can run on the device, and what to do; None where it can."""
    if not device.startswith("cuda") or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"this PyTorch ({torch.__version__}) has no CUDA: name an interpreter whose PyTorch has it "
            "(make gpu GPU_PYTHON=python3), or a build of it (make gpu VENV=.venv-gpu TORCH=...)"
        )
    return f"this PyTorch ({torch.__version__}) has CUDA {torch.version.cuda}, but sees no GPU: check nvidia-smi"


def main(
    given: Sequence[str] | None = None, capture: Capture | None = None, shape: dict[str, Any] | None = None
) -> int:
    """``capture`` and ``shape`` (of the random model) are for tests, on a CPU."""
    options = arguments(given)
    if why := no_gpu(options.device):
        print(why, file=sys.stderr)
        return 2
    try:
        for label in options.models:
            resolve(options.tokenizer_of if label == RANDOM else label)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    report = Report(options.json, options.device, options.dtype)
    if options.device != "cpu":
        print(f"{torch.cuda.get_device_name(options.device)}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    try:
        for label in options.models:
            run_model(report, label, options, capture, shape)
        report.found["complete"] = True
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        report.write()
    print()
    return report.verdict() or (0 if report.found["complete"] else 130)


if __name__ == "__main__":
    sys.exit(main())

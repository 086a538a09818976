"""The machine that figures were measured on, and two quick measurements of its limits.

>>> sorted(describe())[:3]
['cores', 'cpu', 'memory_gb']

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

_GROUPS = Path("/sys/fs/cgroup")
_BUDGET = 0.6  # seconds a measurement may repeat for; the best of the repetitions counts


def give_back() -> None:
    """Return memory that was freed to the system, where the C library keeps it for itself and can be told not to."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def describe() -> dict[str, Any]:
    """CPU, cores, threads that torch uses (None before torch is imported), memory, system and versions."""
    import psutil  # type: ignore[import-untyped, unused-ignore]

    torch = sys.modules.get("torch")
    return {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "usable_cpus": usable_cpus(),
        "threads": torch.get_num_threads() if torch else None,
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "outpace": _version("outpace"),
    }


def fingerprint() -> dict[str, Any]:
    """What tells this machine, as far as the times of forwards go, from another."""
    return {
        "cpu": cpu_model(),
        "usable_cpus": usable_cpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": _version("torch"),
        "outpace": _version("outpace"),
    }


def cpu_model() -> str:
    """The processor's name as it calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in {"model name", "Model", "Hardware"}:
                return value.strip()
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Logical CPUs that this process may run on (containers often allow fewer than there are)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_matmul(dtype: str = "float32", size: int = 1024) -> float:
    """Billions of operations per second of PyTorch's square matrix product, the best of a few repetitions.

    ``dtype``: "float32", "bfloat16", "float16", or "int8" (sums in int32; 0 where PyTorch has no such product).
    """
    import torch

    if dtype == "int8":
        product: Any = getattr(torch, "_int_mm", None)  # what PyTorch's own quantised layers call
        left, right = (torch.randint(-100, 100, (size, size), dtype=torch.int8) for _ in range(2))
        try:
            return float(2 * size**3 / best_time(lambda: product(left, right)) / 1e9)
        except (RuntimeError, TypeError):
            return 0.0
    kind = getattr(torch, dtype.removeprefix("torch."))
    # A precision without fast kernels is a hundred times slower: find out on a small product first.
    small = torch.randn(256, 256).to(kind)
    began = perf_counter()
    small @ small
    if (perf_counter() - began) * (size / 256) ** 3 > _BUDGET:
        size = 256
    left, right = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
    return float(2 * size**3 / best_time(lambda: left @ right) / 1e9)


def reset_peak_memory() -> None:
    """Start a new observation of the process's peak memory, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> float:
    """The process's largest resident memory in MB since :func:`reset_peak_memory`.

    Where the peak cannot be reset it is the largest since the process began; without /proc it is the present one.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    import psutil

    return float(psutil.Process().memory_info().rss / 1e6)


def best_time(work: Any) -> float:
    """Seconds of the quickest repetition within the budget; the first one warms up and does not count alone."""
    began = perf_counter()
    work()
    best = perf_counter() - began
    for _ in range(50):
        if perf_counter() - began > _BUDGET:
            break
        start = perf_counter()
        work()
        best = min(best, perf_counter() - start)
    return best


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def free_memory() -> int:
    """Bytes of main memory that this program could have now; a container's or service's limit counts (Linux)."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_left_in_groups(Path("/proc/self/cgroup"), _GROUPS)])


def _left_in_groups(own: Path, root: Path) -> list[int]:
    """What the limits of this process's control groups (version 2) leave; files that are cached give way."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        group = root / next(line[4:] for line in own.read_text().splitlines() if line.startswith("0::/"))
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (limit := _number(folder / "memory.max")) is not None:
                cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
                used = (_number(folder / "memory.current") or 0) - (int(cached[1]) if cached else 0)
                found.append(max(0, limit - used))
    return found


def _number(file: Path) -> int | None:
    """A file's number; None where there is no file, or no number in it ("max")."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None

"""A library that was compiled when it was installed, and whose build this CPU does not run: it is compiled again.

llama.cpp's kernels for Intel's AMX tiles end some processes by SIGSEGV (llama.cpp's issue 20824). The installed build
stays as it is: the new one is in a folder of the cache, and only its worker finds it.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from outpace.core.files import atomic_folder
from outpace.models.gguf_cache import cache_dir

_SIGNALS = {signal.SIGSEGV, signal.SIGILL}


@dataclass(frozen=True, slots=True)
class Remedy:
    """How to build. ``flags``: for the C and C++ compilers."""

    how: str
    flags: tuple[str, ...] = ()


# ggml compiles for the CPU that it finds; options such as GGML_AMX_TILE=OFF then have no effect, flags have.
WITHOUT_TILES = Remedy("without AMX tiles", ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"))
FOR_THIS_CPU = Remedy("for this CPU")
_CMAKE = ("-DGGML_NATIVE=ON", "-DLLAVA_BUILD=OFF")


def remedy_for(ended_by: int | None) -> Remedy | None:
    """What may help a process that ended by this signal; None where nothing is known to."""
    if ended_by in _SIGNALS and "amx_tile" in cpu_flags():
        return WITHOUT_TILES
    return FOR_THIS_CPU if ended_by == signal.SIGILL else None


def cpu_flags() -> frozenset[str]:
    """What this CPU can do, as Linux names it; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").split())


def rebuilt(package: str, remedy: Remedy, build: Callable[[dict[str, Any]], object], patience: float = -1) -> Path:
    """The folder that has this build of the installed version: that of the cache, or the one that ``build`` fills now.

    ``patience``: seconds to wait for another process that builds; negative: any time. Raises OSError where the cache
    cannot be written or the wait was too long.
    """
    number = version(package)
    root = cache_dir() / "builds"
    machine = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    how = remedy.how.replace(" ", "-").lower()
    folder = root / f"{package}-{number}-{sys.implementation.cache_tag}-{how}-{machine}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock", timeout=patience):
        for leftover in root.glob(".*.unfinished"):  # of builds that were killed: with the lock held, none is at work
            shutil.rmtree(leftover, ignore_errors=True)
        if not folder.is_dir():
            with atomic_folder(folder) as target:
                build(
                    {"package": package, "version": number, "flags": remedy.flags, "cmake": _CMAKE}
                    | {"target": str(target)}
                )
    return folder

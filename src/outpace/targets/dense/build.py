"""Building the kernels: once for this machine and this source, with the compiler that is there.

    <cache>/native/<digest>.so      the digest covers source, compiler, flags and the processor's instruction sets

Nothing is downloaded and ``pip install`` compiles nothing. Where there is no compiler, or ``OUTPACE_NATIVE=0``, the
kernels are not available and callers take the generic target.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from outpace.errors import OutpaceError
from outpace.models.gguf_cache import cache_dir
from outpace.models.placement import cpu_flags

SOURCE = Path(__file__).parent / "native"
SWITCH = "OUTPACE_NATIVE"
_FLAGS = [
    *("-O3", "-std=c++17", "-fPIC", "-pthread"),
    # A product must round as written, or a row's result would depend on the loop it was computed in.
    *("-ffp-contract=off", "-fno-math-errno"),
    *("-Wno-psabi", "-w"),
]


class NotAvailable(OutpaceError):
    """The kernels cannot be had here; the message says why and what would help."""


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built now if they were not before. Raises NotAvailable."""
    if os.environ.get(SWITCH) == "0":
        raise NotAvailable(f"switched off by {SWITCH}=0")
    compiler = _compiler()
    flags = [*_FLAGS, *shlex.split(os.environ.get("OUTPACE_NATIVE_FLAGS", _tuning()))]
    folder = cache_dir() / "native"
    path = folder / f"{_digest(compiler, flags)}.so"
    if not path.is_file():
        _compile(compiler, flags, folder, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotAvailable(
            f"the compiled kernels do not load ({error}); delete '{path}' to build them again"
        ) from error


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise NotAvailable("no C++ compiler was found; install g++ or clang++ for several times the speed")


def _tuning() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _digest(compiler: list[str], flags: list[str]) -> str:
    digest = hashlib.sha256()
    for file in sorted(SOURCE.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotAvailable(f"the compiler '{shlex.join(compiler)}' does not run ({error})") from error
    digest.update(version + shlex.join(flags).encode() + " ".join(sorted(cpu_flags())).encode())
    return digest.hexdigest()[:24]


def _compile(compiler: list[str], flags: list[str], folder: Path, path: Path) -> None:
    """Compile each file, link, and put the library in place by one rename; two builders at once do no harm."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as room:
            sources = sorted(SOURCE.glob("*.cpp"))
            objects = [str(Path(room) / f"{source.stem}.o") for source in sources]
            commands = [
                [*compiler, *flags, "-c", str(source), "-o", target]
                for source, target in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor() as threads:
                list(threads.map(_run, commands))
            linked = str(Path(room) / "library.so")
            _run([*compiler, "-shared", "-pthread", *objects, "-o", linked])
            Path(linked).replace(path)
    except OSError as error:
        raise NotAvailable(f"the kernels cannot be built in '{folder}' ({error})") from error


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise NotAvailable(f"the compiler '{command[0]}' does not build the kernels: {first}")

"""Building the kernels, once for this machine and this source, with the installed C++ compiler.

    <cache>/native/<digest>-<content>.so

The first digest covers source, compiler, flags and the processor's instruction sets; the second is of the library
itself, for a damaged one may load and then end the process. A damaged one is built again.

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

from outpace.core.errors import OutpaceError, shortened
from outpace.models.gguf_cache import cache_dir
from outpace.models.placement import cpu_flags, cpu_vendor

SOURCE = Path(__file__).parent / "native"
SWITCH = "OUTPACE_NATIVE"
_FLAGS = [
    *("-O3", "-std=c++17", "-fPIC", "-pthread"),
    # A product must round as written, or a row's result would depend on the loop it was computed in.
    *("-ffp-contract=off", "-fno-math-errno"),
    *("-Wno-psabi", "-w"),
]


class NotAvailable(OutpaceError):
    """The kernels cannot be built or loaded here; the message says why and what would help."""


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built now if they were not before. Raises NotAvailable."""
    if os.environ.get(SWITCH) == "0":
        raise NotAvailable(f"switched off by {SWITCH}=0")
    try:
        compiler = _compiler()
        flags = [*_FLAGS, *shlex.split(os.environ.get("OUTPACE_NATIVE_FLAGS", tuning()))]
    except ValueError as error:
        raise NotAvailable(f"CXX or OUTPACE_NATIVE_FLAGS cannot be read as a command line ({error})") from error
    folder = cache_dir() / "native"
    digest = _digest(compiler, flags)
    try:
        path = _built(folder, digest) or _compile(compiler, flags, folder, digest)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotAvailable(f"the kernels cannot be built or loaded in '{folder}' ({error})") from error


def _built(folder: Path, digest: str) -> Path | None:
    """The library that was built before, if it is whole."""
    for path in folder.glob(f"{digest}-*.so"):
        if path.stem == f"{digest}-{_content(path)}":
            return path
    return None


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise NotAvailable("no C++ compiler was found; install g++ or clang++ for several times the speed")


def tuning() -> str:
    """The flags for this processor, as a command line has them; ``OUTPACE_NATIVE_FLAGS`` takes their place."""
    if platform.machine() in ("aarch64", "arm64"):
        return "-mcpu=native"
    # Intel's product of pairs of bfloat16 takes as long as four of float32, of which two do the same (LOG.md); AMD's
    # as long as one.
    return "-march=native -DOUTPACE_WIDE_BF16" if cpu_vendor() == "GenuineIntel" else "-march=native"


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


def _compile(compiler: list[str], flags: list[str], folder: Path, digest: str) -> Path:
    """Compile each file, link, and put the library in place by one rename; two builders at once do no harm."""
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
        linked = Path(room) / "library.so"
        _run([*compiler, "-shared", "-pthread", *objects, "-o", str(linked)])
        return linked.replace(folder / f"{digest}-{_content(linked)}.so")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NotAvailable(f"the compiler '{command[0]}' does not build the kernels: {shortened(first)}")

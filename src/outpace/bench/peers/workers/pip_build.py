"""pip as a worker: it compiles a package for this machine, into a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

# The first of these that occurs is the cause, in this order: pip's own lines only say that something failed.
_REASONS = [re.compile(pattern) for pattern in (r"^CMake Error", r": (fatal )?error: ", r"^ERROR: ", r"\b[Ee]rror: ")]


def load(settings: dict[str, Any]) -> SimpleNamespace:
    """Build ``package`` at ``version`` into ``target``; ``flags`` are for the compilers. It answers nothing afterwards.

    pip's cache is not used: what it holds may have been compiled with other flags.
    """
    flags = " ".join(settings["flags"])
    around = dict(os.environ)
    for name, more in (("CFLAGS", flags), ("CXXFLAGS", flags), ("CMAKE_ARGS", " ".join(settings["cmake"]))):
        around[name] = f"{around.get(name, '')} {more}".strip()
    package, version = settings["package"], settings["version"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--no-binary", package, "--target", settings["target"], f"{package}=={version}"]
    ran = subprocess.run(command, env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(_reason(ran.stdout) or f"pip ended with exit code {ran.returncode}")
    return SimpleNamespace(version=version, precision="", failed={})


def _reason(output: str) -> str:
    """The line that says why, with what follows it after a colon."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for reason in _REASONS:
        for place, line in enumerate(lines):
            if reason.search(line) and "subprocess-exited-with-error" not in line:
                return " ".join(lines[place : place + 2]) if line.endswith(":") else line
    return lines[-1] if lines else ""

"""Runs a model's program with its tests in a process of its own, which can compute and nothing else.

The process has no network, opens no file for writing, starts no other process, and is limited in memory and time
(:mod:`outpace.bench.quality.confined_program`); it stands in an empty folder, without this process's environment, and
is killed with its session when its time is over. Where the system cannot confine a process, nothing is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from functools import cache
from typing import Literal

from outpace.bench.quality import confined_program
from outpace.core.errors import BadInput

SECONDS = 10.0
MEMORY = 1 << 30
_LONG = 60.0
Outcome = Literal["passed", "failed", "timed out"]


@cache
def can_confine() -> bool:
    """Whether this system can run a program confined: Linux on x86-64 and ARM64 that lets processes set filters."""
    try:
        # Long enough for a loaded machine: the answer holds for the process.
        return run_tests("def f(): pass", "def check(candidate): candidate()", "f", seconds=_LONG) == "passed"
    except BadInput:
        return False


def run_tests(program: str, tests: str, entry_point: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> Outcome:
    """Run ``program``, then ``tests``, then ``check`` with the function ``entry_point``.

    ``seconds`` of wall time and of CPU time; ``memory``: bytes of address space. Raises BadInput where the system
    cannot confine a process.
    """
    word = secrets.token_hex(16)
    reader, writer = os.pipe()
    task = {"program": program, "tests": tests, "entry_point": entry_point, "report": writer, "word": word}
    try:
        with tempfile.TemporaryDirectory(prefix="outpace-tests-") as folder:
            ended = _run(json.dumps({**task, "seconds": seconds, "memory": memory}), folder, writer, seconds)
        os.set_blocking(reader, False)
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(reader, 64)
    finally:
        os.close(reader)
        os.close(writer)
    if said == word.encode():
        return "passed"
    # An exit code alone would be the program's to give.
    if ended == confined_program.CANNOT_CONFINE and said == confined_program.UNCONFINED + word.encode():
        raise BadInput("this system cannot confine a process, so no program of a model is run on it")
    return "timed out" if ended is None else "failed"


def _run(task: str, folder: str, report: int, seconds: float) -> int | None:
    """The exit code of the confined process; None where its time was over."""
    process = subprocess.Popen(
        # Without site-packages: a score must not depend on what else is installed.
        [sys.executable, "-s", "-P", "-S", "-B", "-X", "utf8", confined_program.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PYTHONHASHSEED": "0"} | {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ},
        start_new_session=True,
        pass_fds=(report,),
        text=True,
    )
    try:
        process.communicate(task, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode

"""Worker: a library's process, as the comparison starts and asks it. Its own side is ``workers/serve.py``."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import IO, Any

from outpace.bench.peers.stopping import TimeLimit

_GLANCE = 1.0  # seconds between two looks at the time limit
_PASSED_ON = 30  # seconds to leave after the pipe was closed; then it is ended


class WorkerError(Exception):
    """A request that brought no answer: why, in one line.

    ``fatal``: the process is gone. ``signal``: the one that ended it, where one did.
    """

    def __init__(self, why: str, *, fatal: bool, signal: int | None = None) -> None:
        super().__init__(why)
        self.fatal, self.signal = fatal, signal


class Worker:
    """A process that answers one request at a time. ``timeout``: seconds for each; ``limit``: for all that is done."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], timeout: float, limit: TimeLimit | None = None
    ) -> None:
        self.timeout, self.limit = timeout, limit or TimeLimit()
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for the runner, and what a library starts ends with its worker
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any], doing: str = "working") -> dict[str, Any]:
        """Send a request and wait for its reply. ``doing``: what the process does meanwhile, for the error.

        Raises WorkerError where there is no reply, or one that says why not; Stopped when the time limit is reached.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._dead(doing) from None
        until = monotonic() + self.timeout
        while True:
            self.limit.check()
            try:
                line = self._lines.get(timeout=max(0.0, min(_GLANCE, self.limit.left, until - monotonic())))
            except queue.Empty:
                if monotonic() < until:
                    continue
                self.end()
                raise WorkerError(f"no reply within {self.timeout:g} s while {doing}", fatal=True) from None
            if line is None:
                raise self._dead(doing)
            reply = _reply(line)
            if reply is None:
                continue  # printed before the worker had its pipes to itself
            if "error" in reply:
                raise WorkerError(str(reply["error"]), fatal=False)
            return reply

    def close(self) -> None:
        """Let it leave by itself, and end it if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PASSED_ON)
        self.end()

    def end(self) -> None:
        """End the process and what it started, now."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (OSError, AttributeError):  # gone already, or a system without process groups
            self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _dead(self, doing: str) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        self.end()
        by = -code if code is not None and code < 0 else None
        how = f"ended with exit code {code}" if by is None else f"ended by {_signal_name(by)}"
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().decode("utf-8", "replace").splitlines() if line.strip()]
        last = f": {lines[-1][:200]}" if lines else ""
        return WorkerError(f"the process {how} while {doing}{last}", fatal=True, signal=by)


def _signal_name(number: int) -> str:
    """SIGSEGV; of the one that a full memory brings, too, what that means."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (did the memory run out?)" if name == "SIGKILL" else name


def _reply(line: str) -> dict[str, Any] | None:
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def environment(threads: int, *, foreign: bool, offline: bool) -> dict[str, str]:
    """What a worker finds in its environment: so many threads, which sleep soon after they have nothing to do.

    A worker that waits for its turn must not take time from the one that is measured; threads that never spin would
    decode slower. ``foreign``: another interpreter, which our packages must not leak into. ``offline``: the weights are
    on this machine, and no library needs the network.
    """
    dropped = {"OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
    if foreign:
        dropped |= {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    found = {name: value for name, value in os.environ.items() if name not in dropped}
    found |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    found |= {
        "GOMP_SPINCOUNT": "10000",
        "KMP_BLOCKTIME": "1",  # milliseconds
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "DO_NOT_TRACK": "1",
    }
    return found | ({"HF_HUB_OFFLINE": "1"} if offline else {})

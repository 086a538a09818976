"""From a plan's process to a running worker that has loaded its library.

Before it loads, a file in another GGUF format is made where the row is to have one. Where a compiled library is ended
by a signal that another build may not bring, it is built again and started once more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from outpace.bench.peers.gguf_formats import kinds, requantized
from outpace.bench.peers.processes import WorkerProcess, worker_command
from outpace.bench.peers.rebuild import Remedy, rebuilt, remedy_for
from outpace.bench.peers.stopping import TimeLimit
from outpace.bench.peers.worker import Worker, WorkerError, environment
from outpace.core.errors import BadInput
from outpace.core.progress import stage

_BUILDING = 3600.0  # seconds that a compiler may take


@dataclass(slots=True)
class Launcher:
    """Starts workers and keeps them, so that none remains. ``on_note``: is told a line before what takes minutes."""

    threads: int
    timeout: float
    offline: bool
    limit: TimeLimit
    on_note: Callable[[str], None]
    _workers: list[Worker] = field(default_factory=list)

    def start(self, process: WorkerProcess) -> tuple[Worker, dict[str, Any]]:
        """The worker, and its reply to having loaded. Raises WorkerError."""
        try:
            return self._load(process)
        except WorkerError as error:
            return self.repair(process, error)

    def repair(self, process: WorkerProcess, error: WorkerError) -> tuple[Worker, dict[str, Any]]:
        """The same with another build of the library. Raises WorkerError: ``error`` itself where no build may help."""
        remedy = remedy_for(error.signal)
        if process.compiled is None or process.build is not None or remedy is None:
            raise error
        try:
            process.build = str(self._build(process, process.compiled, remedy, error))
        except (WorkerError, BadInput, OSError, PackageNotFoundError) as failed:
            self.limit.check()
            why = f"{error}; building it again {remedy.how} failed: {failed}"
            raise WorkerError(why, fatal=True) from failed
        for entry in process.entries:
            entry.note = f"rebuilt {remedy.how}: with the installed build {error}"
        try:
            return self._load(process)
        except WorkerError as again:
            raise WorkerError(f"{error}; rebuilt {remedy.how}, {again}", fatal=True) from again

    def close(self, *, now: bool) -> None:
        """End all workers: ``now``, or as soon as they leave by themselves."""
        for worker in self._workers:
            if now:
                worker.end()
            else:
                worker.close()

    def _load(self, process: WorkerProcess) -> tuple[Worker, dict[str, Any]]:
        if process.requantize is not None:
            self._requantize(process, process.requantize)
        worker = self._worker(process, process.command, self.timeout)
        try:
            return worker, worker.ask({"do": "load", "settings": process.settings}, "loading")
        except WorkerError:
            worker.end()
            raise

    def _requantize(self, process: WorkerProcess, name: str) -> None:
        """Let the process load its GGUF file in another format."""
        source = process.settings["gguf"]

        def quantize(target: Path) -> None:
            with stage(f"requantizing to {name}"):
                asked = {"source": source, "target": str(target), "format": name, "threads": self.threads}
                self._once(process, "llama_cpp_requantize.py", asked, f"requantizing to {name}", self.timeout)

        try:
            made = requantized(Path(source), name, quantize)
        except BadInput as error:
            raise WorkerError(str(error), fatal=True) from error
        process.settings |= {"gguf": str(made), "gguf_kind": kinds(made)}
        process.requantize = None

    def _build(self, process: WorkerProcess, package: str, remedy: Remedy, error: WorkerError) -> Path:
        def build(settings: dict[str, Any]) -> None:
            self.on_note(f"{package}: {error}. It is built again {remedy.how}, once; this takes some minutes.")
            with stage(f"building {package} {remedy.how}"):
                self._once(process, "pip_build.py", settings, "building", max(_BUILDING, self.timeout))

        return rebuilt(package, remedy, build, min(_BUILDING, self.limit.left))

    def _once(
        self, process: WorkerProcess, worker: str, settings: Mapping[str, Any], doing: str, timeout: float
    ) -> None:
        """Let a worker do all its work when it loads, under the interpreter of ``process``."""
        one = self._worker(process, worker_command(process.command[0], worker), timeout)
        try:
            one.ask({"do": "load", "settings": settings}, doing)
        finally:
            one.end()

    def _worker(self, process: WorkerProcess, command: list[str], timeout: float) -> Worker:
        around = environment(self.threads, foreign=process.foreign, offline=self.offline)
        if process.build is not None:
            around["PYTHONPATH"] = os.pathsep.join(filter(None, (process.build, around.get("PYTHONPATH"))))
        try:
            worker = Worker(command, around, timeout, self.limit)
        except OSError as error:
            raise WorkerError(f"cannot start {command[0]}: {error.strerror}", fatal=True) from error
        self._workers.append(worker)
        return worker

"""Server: the child process, its metrics, and what it holds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any
from urllib.request import urlopen

_BENCHMARKS = Path(__file__).parents[1]
_WAIT = 120.0
"""Seconds that the start and a census may take."""


class Server:
    """``outpace serve`` with these arguments, from its start to its end. Its standard error is in ``folder``/log."""

    def __init__(self, folder: Path, arguments: Seq[str], port: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self._report = folder / "log", folder / "census"
        about = os.environ | {"PYTHONPATH": os.pathsep.join([str(_BENCHMARKS), *filter(None, sys.path)])}
        command = [sys.executable, "-m", "soaking.child", str(self._report), "serve", "--port", str(port), *arguments]
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr, stdout=stderr, env=about)
        self.port = self._ready()

    def _ready(self) -> int:
        until = time.monotonic() + _WAIT
        while not (found := re.search(r"^ready: http://\S+:(\d+)$", self.text, re.MULTILINE)):
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"the server did not start: {self.text[-2000:]}")
            time.sleep(0.05)
        return int(found[1])

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """The values of /metrics without buckets, by name and labels as they are written there."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name.removeprefix("outpace:"): float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
            if "_bucket" not in name
        }

    def total(self, name: str) -> float:
        """A metric's sum over its labels."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)

    def census(self, clear: bool = False) -> dict[str, Any]:
        """What the process holds; with ``clear`` after its cached prompts were released."""
        flag = self._report.with_name(self._report.name + ".clear")
        flag.touch() if clear else flag.unlink(missing_ok=True)
        self._report.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + _WAIT
        while not self._report.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server tells nothing: {self.text[-2000:]}")
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(self._report.read_text())
        return found

    def rss(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def idle(self, seconds: float = 30.0) -> bool:
        """Wait until no request runs or waits. Whether that came in time."""
        until = time.monotonic() + seconds
        while self.total("num_requests_running") or self.total("num_requests_waiting"):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None where it has not ended in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it at once."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

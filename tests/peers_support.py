"""Libraries that are none: what a worker may do to the runner, in a few lines each, in real processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from outpace.bench.peers.comparison import Comparison, ComparisonSettings
from outpace.bench.peers.entries import Entry, Question
from outpace.bench.peers.processes import WORKERS, Job, Plan, WorkerProcess
from outpace.bench.peers.round_robin import RoundRobin
from outpace.bench.peers.stopping import TimeLimit
from outpace.bench.peers.weights import Weights

FAKE = """
import os, signal, sys, time

MODE, LOG = {mode!r}, {log!r}
REBUILT = any(os.path.exists(os.path.join(place, "rebuilt")) for place in sys.path)
print("chatter on import")

def crash(number):
    if not REBUILT or "always" in MODE:
        os.kill(os.getpid(), number)
        time.sleep(60)

def load(settings):
    os.write(1, b'native chatter\\n{{"error": "not a reply"}}\\n')
    if MODE == "refuses":
        raise FileNotFoundError("no such\\nfile")
    if MODE == "hangs while loading":
        time.sleep(60)
    if MODE.startswith("crashes while loading"):
        crash(signal.SIGSEGV)
    return Engine(settings)

class Engine:
    version, precision = "9.9", "toy"

    def __init__(self, settings):
        self.failed = {{"odd": "needs a draft model"}}
        self.count = 0
        assert sys.stdin.read() == ""  # the requests are not for libraries to read

    def answer(self, config, prompt, length, emit):
        print("chatter")
        self.count += 1
        with open(LOG, "a") as log:
            log.write(f"{{MODE}}/{{config}} {{prompt[0]}} {{length}}\\n")
        if MODE == "dies" and self.count == 3:
            sys.stderr.write("first\\nout of memory, it seems\\n")
            os._exit(3)
        if MODE == "hangs" and self.count == 3:
            time.sleep(60)
        if MODE == "crashes" and self.count == 3:
            crash(signal.SIGSEGV)
        if MODE == "is killed" and self.count == 3:
            crash(signal.SIGKILL)
        if MODE == "needs another CPU":
            crash(signal.SIGILL)
        if MODE == "raises" and config == "bad" and self.count > 3:
            raise ValueError("cannot\\ncompute")
        if MODE == "silent":
            return
        tokens = [prompt[0] + i for i in range(length - (MODE == "short"))]
        emit([])
        time.sleep(0.01)
        emit(tokens[:1])
        time.sleep(0.01)
        emit(tokens[1:] + [7] * (3 if MODE == "long" else 0))
"""

QUESTIONS = [Question(f"q{i}", "one" if i % 2 else "two", (100 * i + 1, 2, 3)) for i in range(4)]
WARM_UP = Question("warm-up", "", (9, 9))


def fake(
    folder: Path, mode: str, configs: Sequence[str] = ("plain",), *, ours: bool = False, compiled: str | None = None
) -> WorkerProcess:
    """A process that behaves as ``mode`` says. ``compiled``: the package that may be built again."""
    path = folder / f"{mode.replace(' ', '_')}.py"
    path.write_text(FAKE.format(mode=mode, log=str(folder / "log")))
    entries = [Entry("outpace" if ours else mode, config, ours=ours) for config in configs]
    settings: dict[str, dict[str, dict[str, int]]] = {"configs": {config: {} for config in configs}}
    return WorkerProcess(entries, [sys.executable, str(WORKERS / "serve.py"), str(path)], settings, compiled=compiled)


def plan_of(*processes: WorkerProcess) -> Plan:
    """A plan with these processes."""
    plan = Plan()
    for one in processes:
        plan.add(one)
    return plan


def run_of(
    plan: Plan, *, length: int = 5, timeout: float = 30, questions: Sequence[Question] = QUESTIONS
) -> RoundRobin:
    """A run over the four questions."""
    return RoundRobin(plan, questions, WARM_UP, length=length, threads=1, timeout=timeout, offline=True)


def comparison_of(plan: Plan, *, max_minutes: float | None = None) -> Comparison:
    """All of a comparison but what finds and encodes: of these processes, over the four questions."""
    settings = ComparisonSettings("m", (), max_new_tokens=5, threads=1, timeout=30, max_minutes=max_minutes)
    job = Job(Weights("m", "/m", None, "", True), None, "float32", 1, 256)
    limit = TimeLimit(max_minutes)
    return Comparison(settings, plan, job, ("float32",), tuple(QUESTIONS), WARM_UP, (), limit)

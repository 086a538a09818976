"""Every library answers a prompt in turn, one at a time, before the next prompt; the order rotates.

Before the first prompt every row answers one that is not counted. A process that dies or does not answer in time ends
its rows' part; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import sleep
from typing import TypeVar

from outpace.bench.peers.cpu_contention import CpuContention
from outpace.bench.peers.entries import Answer, Entry, Question
from outpace.bench.peers.processes import Plan, WorkerProcess
from outpace.bench.peers.worker import Worker, WorkerError, environment
from outpace.bench.settings import Progress

Item = TypeVar("Item")

_WARMUP_TOKENS = 32
_REST = 0.05  # seconds between two answers, in which the threads of the last one fall asleep


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """The items in turn, another one first each time."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


@dataclass(slots=True)
class RoundRobin:
    """Asks the plan's processes. ``go`` fills the entries' answers; Ctrl-C ends it early, with whole prompts only."""

    plan: Plan
    questions: Sequence[Question]
    warm_up: Question
    length: int
    threads: int
    timeout: float
    offline: bool = False
    on_progress: Callable[[Progress], None] | None = None
    done: int = 0
    others: CpuContention = field(default_factory=CpuContention)
    _workers: dict[Entry, Worker] = field(default_factory=dict)

    def go(self) -> bool:
        """Ask everything; False where Ctrl-C ended it early."""
        try:
            for process in self.plan.processes:
                self._start(process)
            for entry in self.plan.entries:
                self._ask(entry, self.warm_up, min(self.length, _WARMUP_TOKENS), "warm-up")
            for number, question in enumerate(self.questions):
                self._round(number, question)
            self._tell("", "")
        except KeyboardInterrupt:
            return False
        finally:
            for worker in set(self._workers.values()):
                worker.close()
        return True

    def _start(self, process: WorkerProcess) -> None:
        self._tell(process.entries[0].name, "loading")
        try:
            around = environment(self.threads, foreign=process.foreign, offline=self.offline)
            worker = Worker(process.command, around, self.timeout)
        except OSError as error:
            _fail(process.entries, f"cannot start {process.command[0]}: {error.strerror}")
            return
        self._workers |= dict.fromkeys(process.entries, worker)
        try:
            reply = worker.ask({"do": "load", "settings": process.settings})
        except WorkerError as error:
            worker.end()
            _fail(process.entries, str(error))
            return
        for entry in process.entries:
            entry.version, entry.precision = reply["version"], reply["precision"]
            entry.error = entry.error or reply["failed"].get(entry.config)

    def _round(self, number: int, question: Question) -> None:
        found: dict[Entry, Answer] = {}
        self.others.begin({worker.pid for worker in self._workers.values()})
        for entry in rotated(self.plan.entries, number):
            answer = self._ask(entry, question, self.length, question.category)
            if answer is not None:
                found[entry] = answer
            self.done += 1
        self.others.end()
        for entry, answer in found.items():  # only now: an interrupted round is not counted
            entry.answers[question.id] = answer

    def _ask(self, entry: Entry, question: Question, length: int, what: str) -> Answer | None:
        if entry.error is not None:
            return None
        self._tell(entry.label, what)
        worker = self._workers[entry]
        sleep(_REST)
        asked = {"do": "answer", "config": entry.config, "prompt": question.tokens, "length": length}
        try:
            reply = worker.ask(asked)
        except WorkerError as error:
            of_this_process = [one for one, its in self._workers.items() if its is worker]
            _fail(of_this_process if error.fatal else [entry], str(error))
            return None
        if len(reply["tokens"]) != length:  # rates of answers that differ in length are not compared
            _fail([entry], f"answered {len(reply['tokens'])} of {length} tokens to prompt '{question.id}'")
            return None
        return Answer(tuple(reply["tokens"]), reply["ttft_ms"], reply["seconds"], reply["memory_mb"])

    def _tell(self, label: str, what: str) -> None:
        if self.on_progress is not None:
            rates = {one.label: one.decode_rate(one.answers) for one in self.plan.entries}
            total = len(self.plan.entries) * len(self.questions)
            self.on_progress(Progress(self.done, total, label, what, rates))


def _fail(entries: Sequence[Entry], why: str) -> None:
    """The first reason counts."""
    for entry in entries:
        entry.error = entry.error or why

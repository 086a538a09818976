"""Every library answers a prompt in turn, one at a time, before the next prompt; the order rotates.

Before the first prompt every row answers one that is not counted. A process that dies or does not answer in time ends
its rows' part; the others go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import sleep
from typing import Any, TypeVar

from outpace.bench.peers.cpu_contention import CpuContention
from outpace.bench.peers.entries import Answer, Entry, Question
from outpace.bench.peers.launcher import Launcher
from outpace.bench.peers.processes import Plan, WorkerProcess
from outpace.bench.peers.stopping import TimeLimit
from outpace.bench.peers.worker import Worker, WorkerError
from outpace.bench.settings import Progress

Item = TypeVar("Item")

_WARMUP_TOKENS = 32
_REST = 0.05  # seconds between two answers, in which the threads of the last one fall asleep


def shuffled(items: Sequence[Item], number: int) -> list[Item]:
    """The items in an order of their own for each number: none always follows the same one, whose threads may still
    spin and whose weights fill the caches."""
    return random.Random(number).sample(items, len(items))


@dataclass(slots=True)
class RoundRobin:
    """Asks the plan's processes. ``go`` fills the entries' answers.

    ``on_change`` is told of a row that answered its last prompt or failed, and with None of a prompt that all rows
    answered; ``on_note`` of what takes minutes. ``answered``: how many prompts all rows answered. ``stopped``: what
    ended the run early.
    """

    plan: Plan
    questions: Sequence[Question]
    warm_up: Question
    length: int
    threads: int
    timeout: float
    offline: bool = False
    limit: TimeLimit = field(default_factory=TimeLimit)
    on_progress: Callable[[Progress], None] = lambda _: None
    on_note: Callable[[str], None] = lambda _: None
    on_change: Callable[[Entry | None], None] = lambda _: None
    done: int = 0
    answered: int = 0
    stopped: str | None = None
    others: CpuContention = field(default_factory=CpuContention)
    _launcher: Launcher = field(init=False)
    _running: dict[Entry, tuple[WorkerProcess, Worker]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._launcher = Launcher(self.threads, self.timeout, self.offline, self.limit, self._note)

    def go(self) -> bool:
        """Ask everything; False where Ctrl-C, a signal or the time limit ended it early. No process remains."""
        whole = False
        try:
            for entry in self.plan.entries:
                if entry.error is not None:
                    self.on_change(entry)
            for process in self.plan.processes:
                self._start(process)
            for entry in self.plan.entries:
                self._ask(entry, self.warm_up, "warm-up")
            for number, question in enumerate(self.questions):
                self._round(number, question)
            self._tell("", "")
            whole = True
        except KeyboardInterrupt as stop:
            self.stopped = str(stop) or "Ctrl-C"
        finally:
            self._launcher.close(now=not whole)
        return whole

    def _start(self, process: WorkerProcess) -> None:
        self._tell(process.entries[0].label, "loading")
        self.limit.check()
        try:
            self._started(process, *self._launcher.start(process))
        except WorkerError as error:
            self._fail(process.entries, str(error))

    def _started(self, process: WorkerProcess, worker: Worker, reply: dict[str, Any]) -> None:
        self._running |= dict.fromkeys(process.entries, (process, worker))
        for entry in process.entries:
            entry.version, entry.precision = reply["version"], reply["precision"]
            if entry.config in reply["failed"]:
                self._fail([entry], reply["failed"][entry.config])

    def _round(self, number: int, question: Question) -> None:
        self.others.begin({worker.pid for _, worker in self._running.values()})
        for entry in shuffled(self.plan.entries, number):
            answer = self._ask(entry, question, question.category)
            if answer is not None:
                entry.answers[question.id] = answer
                if number + 1 == len(self.questions):
                    self.on_change(entry)
            self.done += 1
        self.others.end()
        self.answered = number + 1
        self.on_change(None)

    def _ask(self, entry: Entry, question: Question, what: str) -> Answer | None:
        if entry.error is not None:
            return None
        self._tell(entry.label, what)
        process, worker = self._running[entry]
        warm = question is self.warm_up
        length = min(self.length, _WARMUP_TOKENS) if warm else self.length
        doing = "answering the warm-up prompt" if warm else f"answering prompt {self.questions.index(question) + 1}"
        sleep(_REST)
        asked = {"do": "answer", "config": entry.config, "prompt": question.tokens, "length": length}
        try:
            reply = worker.ask(asked, doing)
        except WorkerError as error:
            if not error.fatal:
                self._fail([entry], str(error))
                return None
            return self._ask(entry, question, what) if self._repaired(process, error) else None
        if len(reply["tokens"]) != length:  # rates of answers that differ in length are not compared
            self._fail([entry], f"answered {len(reply['tokens'])} of {length} tokens to prompt '{question.id}'")
            return None
        tokens = tuple(reply["tokens"])
        return Answer(tokens, reply["first"], reply["ttft_ms"], reply["seconds"], reply["memory_mb"])

    def _repaired(self, process: WorkerProcess, error: WorkerError) -> bool:
        """Whether the process runs again, in another build, which has answered anew what the first one had."""
        try:
            self._started(process, *self._launcher.repair(process, error))
        except WorkerError as final:
            self._fail(process.entries, str(final))
            return False
        for entry in process.entries:
            self._ask(entry, self.warm_up, "warm-up")
            anew: dict[str, Answer] = {}
            try:
                for question in self.questions[: self.answered]:
                    answer = self._ask(entry, question, question.category)
                    if answer is not None:
                        anew[question.id] = answer
            except KeyboardInterrupt:
                self._fail(process.entries, "was being measured again, in another build, when the run was stopped")
                raise
            entry.answers = anew  # never some of one build and some of the other
        return True

    def _fail(self, entries: Sequence[Entry], why: str) -> None:
        """The first reason counts."""
        for entry in entries:
            if entry.error is None:
                entry.error = why
                self.on_change(entry)

    def _tell(self, label: str, what: str) -> None:
        rates = {one.label: one.decode_rate(one.answers) for one in self.plan.entries}
        total = len(self.plan.entries) * len(self.questions)
        self.on_progress(Progress(self.done, total, label, what, rates))

    def _note(self, text: str) -> None:
        self.on_note(text)

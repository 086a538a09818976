"""A worker: one library in a process of its own, which answers prompts when it is asked to.

    python serve.py LIBRARY.py        # requests on standard input, replies on standard output, a JSON object a line

    {"do": "load", "settings": {...}}                               {"version", "precision", "failed": {config: why}}
    {"do": "answer", "config": "plain", "prompt": [ids], "length": 48}
                                                           {"ttft_ms", "first", "seconds", "tokens", "memory_mb"}

"first" is how many tokens came together, first of all: "seconds" are those of the others.
A request may have a "grammar" beside its prompt: {"kind": "schema" or "lark", "source": text, "gbnf": text}, and
"on_demand" for a library that can obey it in two ways. Its answer ends where the grammar does; every other answer has
its full length.

Any reply may be ``{"error": "one line"}`` instead. The end of the input ends the process, also in the middle of an
answer: nothing of it outlives a runner that was killed. LIBRARY.py has a function ``load(settings)`` that returns an
:class:`Engine`.

This file stands alone, on the standard library, for it also runs where outpace is not installed. It holds the only
clock: every library's tokens are timed by the same lines, when the library hands them out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Protocol

Emit = Callable[[list[int]], None]
_LONGEST = 280
_GRACE = 1.0  # seconds in which an idle process ends by itself


class Engine(Protocol):
    """A loaded library. ``failed``: configurations that it cannot run, and why, in one line each.

    One that can be asked with a grammar says so by a true attribute ``takes_grammars``.
    """

    version: str
    precision: str
    failed: dict[str, str]

    def answer(self, config: str, prompt: list[int], length: int, emit: Emit, *grammar: dict[str, Any]) -> None:
        """Decode greedily, past any end-of-sequence token, and ``emit`` tokens as they come.

        Under a ``grammar``, the last argument of a request that has one, an answer ends where the model ends it and the
        grammar lets it; tokens that only end an answer are not put out.
        """
        ...


class Clock:
    """Notes when tokens arrive. What arrives beyond ``length`` was not asked for, and is not counted."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.tokens: list[int] = []
        self.first = self.last = 0.0
        self.at_first = 0  # tokens that came together, first of all
        self.began = perf_counter()

    def emit(self, tokens: list[int]) -> None:
        now = perf_counter()
        if not tokens or len(self.tokens) >= self.length:
            return
        if not self.tokens:
            self.first = now
        self.last = now
        self.tokens.extend(tokens[: self.length - len(self.tokens)])
        self.at_first = self.at_first or len(self.tokens)

    def reply(self) -> dict[str, Any]:
        if not self.tokens:
            return {"error": "it answered no token"}
        return {
            "ttft_ms": 1e3 * (self.first - self.began),
            "first": self.at_first,
            "seconds": self.last - self.first,
            "tokens": [int(token) for token in self.tokens],
        }


def main(path: str) -> None:
    """Answer requests until the input ends."""
    requests, replies = _channel()
    threading.Thread(target=_end_with_runner, args=(requests.fileno(),), daemon=True).start()
    engine: Engine | None = None
    for line in requests:
        try:
            request = json.loads(line)
            if request["do"] == "load":
                engine = _library(path).load(request["settings"])
                reply = {"version": engine.version, "precision": engine.precision, "failed": engine.failed}
            elif engine is None:
                reply = {"error": "nothing is loaded"}
            else:
                reply = _answer(engine, request)
        except Exception as error:  # whatever a library raises, the runner hears of it in one line
            reply = {"error": _one_line(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    _reset_peak_memory()
    grammar = (request["grammar"],) if "grammar" in request else ()
    if grammar and not getattr(engine, "takes_grammars", False):
        raise ValueError("this library's worker takes no grammars")
    clock = Clock(request["length"])
    engine.answer(request["config"], request["prompt"], request["length"], clock.emit, *grammar)
    return clock.reply() | {"memory_mb": _peak_memory_mb()}


def _channel() -> tuple[IO[str], IO[str]]:
    """The runner's two pipes, out of the libraries' reach: what these print goes to standard error."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def _end_with_runner(requests: int) -> None:
    """Wait until the runner's end of the pipe is closed; then end this process and what it started."""
    if not hasattr(select, "poll"):
        return
    closed = select.poll()
    closed.register(requests, 0)  # no events but the hang-up, which is always reported
    closed.poll()
    time.sleep(_GRACE)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _library(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("library", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _one_line(error: BaseException) -> str:
    said = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    half = _LONGEST // 2  # of a long one whole words in the middle go: libraries put the reason last, or first
    return said if len(said) <= _LONGEST else f"{said[:half].rpartition(' ')[0]} ... {said[-half:].partition(' ')[2]}"


def _reset_peak_memory() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory_mb() -> float | None:
    """Largest resident memory since the reset, in MB; None where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return None


if __name__ == "__main__":
    # Python puts this folder first on the path, where `transformers.py` would stand before the library of that name.
    here = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if place and Path(place).resolve() != here]
    main(sys.argv[1])
    sys.stderr.flush()
    os._exit(0)  # nothing here is worth a library's long farewell

"""How many functions a round calls beside the kernels, by phase: a count that a busy machine does not change.

    python benchmarks/round_calls.py questions.jsonl --method auto --batch 4

Python's and C's functions, per round of all requests together, of rounds in which nobody drafts. The times of forwards
and drafts are made up (``--row``, ``--draft``, milliseconds), so that two versions of the program decide alike; the
digest is of the answers' tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import outpace
from outpace.api.requests import request
from outpace.controllers.draft_clock import Clock
from outpace.engine import decoder as decoders, round as rounds
from outpace.engine.decoder import Decoder
from outpace.prompts.questions import load_prompts
from outpace.targets.base import Target
from outpace.targets.costs import ForwardCosts
from outpace.targets.row_target import RowTarget

PHASES: list[tuple[Any, str]] = [
    (rounds, "_draft"),
    (RowTarget, "score"),
    (rounds, "_accept"),
    (rounds, "_keep"),
    (rounds, "_commit"),
    (rounds, "_observe"),
    (rounds, "_close_books"),
    (rounds, "_compare_costs"),
]


class MadeUp(ForwardCosts):
    """A forward takes 3 ms and ``row`` for each of its rows, in seconds; whatever else is timed ``draft``."""

    def __init__(self, target: Target, row: float, draft: float) -> None:
        super().__init__(target)
        self._row, self._draft = row, draft

    def seconds(self, rows: int, context: int = 0) -> float:
        return 3e-3 + self._row * rows + 1e-6 * context

    def even(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return self.seconds(rows, context)

    def round_seconds(
        self, rows: int, context: int = 0, *, batch: int = 1, live: bool = False, sampled: bool = False
    ) -> float:
        return self.seconds(rows, context)

    def once(self, name: str, measure: Callable[[], float]) -> float:
        return self._draft

    def took(self, rows: int, context: int, seconds: float, *, greedy: bool, batch: int = 1) -> None:
        """Nothing is compared with a clock."""


def counted(function: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    """The function, which adds the calls made inside to those of its phase."""

    def run(*arguments: Any, **more: Any) -> Any:
        def saw(frame: Any, event: str, argument: Any) -> None:
            if event in ("call", "c_call"):
                calls[name] += 1

        sys.setprofile(saw)
        try:
            return function(*arguments, **more)
        finally:
            sys.setprofile(None)

    return run


def untimed(clock: Clock, count: int) -> None:
    """In place of :meth:`Clock.seconds`: drafts are not timed either."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path, help="Spec-Bench questions, JSON lines or text")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--every", type=int, default=9, help="take each n-th question")
    parser.add_argument("--length", type=int, default=120)
    parser.add_argument("--row", type=float, default=1.5)
    parser.add_argument("--draft", type=float, default=3.0)
    options = parser.parse_args()
    model = outpace.load(options.model)
    model.target.costs = MadeUp(model.target, 1e-3 * options.row, 1e-3 * options.draft)
    setattr(Clock, "seconds", untimed)  # noqa: B010
    calls, quiet, whole = Counter[str](), Counter[str](), rounds.run_round
    seen = 0
    for owner, name in PHASES:
        setattr(owner, name, counted(getattr(owner, name), name.strip("_"), calls))

    def run_round(target: Target, active: Seq[Any]) -> None:
        nonlocal seen
        calls.clear()
        before = sum(one.metrics.drafted for one in active)
        whole(target, active)
        if len(active) == options.batch and sum(one.metrics.drafted for one in active) == before:
            quiet.update(calls)
            seen += 1

    setattr(decoders, "run_round", run_round)  # noqa: B010
    questions = [one.turns[0] for one in load_prompts(options.prompts)[:: options.every]][: options.batch]
    for _ in range(2):  # what is made once in a process is not counted
        quiet.clear()
        seen, decoder = 0, Decoder(model.target, model.tokenizer)
        asked = {"method": options.method, "max_new_tokens": options.length, "ignore_eos": True}
        answers = [decoder.submit(request(model, question, **asked)) for question in questions]
        decoder.run()
    print(f"{seen} rounds of {options.batch} without a draft, calls in each:")
    for name, count in quiet.items():
        print(f"{name:>14} {count / max(seen, 1):8.0f}")
    print(f"{'all':>14} {quiet.total() / max(seen, 1):8.0f}")
    print("answers", hashlib.blake2b(repr([one.tokens for one in answers]).encode(), digest_size=8).hexdigest())


if __name__ == "__main__":
    main()

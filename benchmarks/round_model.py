"""Does the model of a forward hold in rounds? What the cost table has for rows and contexts, beside real forwards.

    python benchmarks/round_model.py --model smollm2 --batches 1,4,8 --prompts PROMPTS.jsonl

Known answers are decoded again, ``batch`` at once, with drafts of random lengths, half of them right. The forward of
each round is timed, and compared with what the table says: as of a batch, with each request's own rows and context, and
as of one sequence with all rows and the mean context. Printed are medians of measured over said, their spread (10 % to
90 %), and the medians of the third of the rounds with the shortest contexts and of that with the longest: they agree
where contexts count for as much as they are said to.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

import numpy as np

import outpace
from outpace.acceptance.rejection import RecursiveRejection
from outpace.advice.probe import Probe
from outpace.controllers.fixed import Fixed
from outpace.core.turns import ROUNDS
from outpace.engine.known_answers import close_answers
from outpace.engine.method import Method
from outpace.engine.round_records import RoundRecord, RoundRecorder
from outpace.prompts.questions import load_prompts
from scripts import answered, exit_status

_MOST = 8
"""Draft tokens of a request."""
_RUN = 4
"""Rounds with as many draft tokens in a row, of which the first does not count."""


def recorded(model: outpace.Model, batch: int, options: argparse.Namespace) -> list[RoundRecord]:
    """Rounds of ``batch`` requests with drafts of random lengths."""
    answers = answered(model, load_prompts(options.prompts, options.limit), options.tokens)
    chance = random.Random(batch)
    try:
        probe = Probe({one.prompt: one.tokens for one in answers}, model.target.vocab_size)
        method = Method("probe", probe, RecursiveRejection(), Fixed(_MOST, max_nodes=_MOST))
        recorder = RoundRecorder(model.target, [one.request(method) for one in answers], batch)
        found: list[RoundRecord] = []
        try:
            while len(found) < options.rounds:
                probe.tokens = chance.choice([0, 0, batch // 2, batch, 2 * batch, 4 * batch])
                found += [recorder.step() for _ in range(_RUN)][1:]
        finally:
            recorder.close()
    finally:
        close_answers(model.target, answers)
    return found


def line(name: str, batch: int, ratios: np.ndarray, contexts: np.ndarray) -> str:
    order = np.argsort(contexts)
    third = len(order) // 3
    short, long = np.median(ratios[order[:third]]), np.median(ratios[order[-third:]])
    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
    return f"{batch:>5}  {name:<13}{middle:>7.2f} [{low:.2f}, {high:.2f}]{short:>10.2f}{long:>9.2f}"


def compare(options: argparse.Namespace) -> None:
    """Print two lines for each batch."""
    model = outpace.load(options.model)
    print(f"{'batch':>5}  {'model':<13}{'measured / said [10 %, 90 %]':<24}{'short':>6}{'long':>9}")
    for batch in map(int, options.batches.split(",")):
        with ROUNDS:
            rounds = recorded(model, batch, options)
        costs = model.target.costs
        took = np.array([one.forward_seconds for one in rounds])
        contexts = np.array([np.mean(one.contexts) for one in rounds])
        own = np.array([costs.forward(one.rows, one.contexts) for one in rounds])
        chain = np.array([costs.seconds(sum(one.rows), int(np.mean(one.contexts))) for one in rounds])
        print(line("batch", batch, took / own, contexts))
        print(line("one sequence", batch, took / chain, contexts), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--prompts", help="a file; without it the embedded set")
    parser.add_argument("--limit", type=int, default=42, help="prompts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args(argv)
    return exit_status(lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())

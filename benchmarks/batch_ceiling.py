"""What several requests at once gain at most from drafts as they are: rows shared out perfectly, drafting at no cost.

    python benchmarks/batch_ceiling.py spec_bench_dev.jsonl --methods sam,eagle3 --limit 36 --batches 1,2,4,8,16
    python benchmarks/batch_ceiling.py spec_bench_dev.jsonl --costs 1:3.8,2:3.9,4:4.4,8:6.2,16:10.9,32:20.7,64:41.7

Greedy decoding of one request at a time is recorded with each method's largest drafts. Rounds of different prompts are
then put together at random to rounds of a batch, and each gets the draft tokens that give it the most expected tokens
per time: by the drafter's probabilities (``stated``), the same without the time to draft (``free``), or by knowing
which will be accepted (``hindsight``). No draft at all is among the choices. Time is that of the forward over all rows,
as measured or given, and ``--draft-ms``; the rest of a round costs nothing. Figures are tokens per time, relative to
autoregressive decoding of the same batch.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outpace
from outpace.controllers.predictor import best_count
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request, RoundTrace
from outpace.model import Model
from outpace.prompts.questions import load_prompts

LARGEST: dict[str, dict[str, Any]] = {"sam": {"num_draft_tokens": 12}, "eagle3": {"max_nodes": 16}}
LARGEST["merge"] = {"parts": ("sam", "eagle3"), "settings": dict(LARGEST)}
ROUNDS = 4000
"""Simulated rounds of a batch."""


@dataclass(frozen=True)
class Recorded:
    """The draft tokens of a round, the likeliest first, and whether each is on the accepted path."""

    probs: tuple[float, ...]
    accepted: tuple[bool, ...]


def recorded(round_: RoundTrace) -> Recorded:
    """What of a round counts here."""
    tree: TokenTree = round_.tree
    order, probs = tree.likeliest_first()
    path = set(round_.path)
    return Recorded(tuple(probs), tuple(node in path for node in order))


def record(model: Model, name: str, prompts: Sequence[str], tokens: int) -> list[Recorded]:
    """Every round of one method; its length is fixed, so that no cost shortens a draft."""
    method = model.method(name, settings=LARGEST.get(name, {}))
    found: list[Recorded] = []
    for prompt in prompts:
        decoder = Decoder(model.target)
        ids = tuple(model.tokenizer.chat([{"role": "user", "content": prompt}]))
        request = Request(ids, method, max_new_tokens=tokens, stop_ids=model.eos_ids, trace=True)
        generation = decoder.submit(request)
        decoder.run()
        found += map(recorded, generation.rounds)
    return found


def gain(rounds: list[Recorded], batch: int, costs: list[float], draft: float, *, hindsight: bool) -> float:
    """Tokens per time against autoregressive decoding. ``costs[n]``: of a batch's forward with n draft tokens."""
    chance = random.Random(batch)
    tokens = time = 0.0
    for _ in range(ROUNDS):
        together = chance.choices(rounds, k=batch)
        if hindsight:
            ranked = sorted(((float(hit), hit) for one in together for hit in one.accepted), reverse=True)
        else:
            pairs = [zip(one.probs, one.accepted, strict=True) for one in together]
            ranked = sorted((pair for each in pairs for pair in each), key=lambda pair: -pair[0])
        spent = draft if ranked else 0.0
        best, forecast = best_count((prob for prob, _ in ranked), costs, batch, spent=spent)
        if forecast.speedup <= batch / costs[0]:
            best, spent = 0, 0.0
        tokens += batch + sum(hit for _, hit in ranked[:best])
        time += costs[best] + spent
    return tokens / time / (batch / costs[0])


def interpolated(table: dict[int, float], rows: int) -> float:
    """Milliseconds of a forward over so many rows; in proportion beyond the table."""
    sizes = sorted(table)
    if rows >= sizes[-1]:
        return table[sizes[-1]] * rows / sizes[-1]
    above = next(size for size in sizes if size >= rows)
    below = max((size for size in sizes if size <= rows), default=above)
    share = 0.0 if above == below else (rows - below) / (above - below)
    return table[below] + share * (table[above] - table[below])


def numbers(text: str) -> dict[str, float]:
    """``name:number,name:number``."""
    return {name: float(value) for name, value in (one.split(":") for one in text.split(",") if one)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--methods", default="sam,eagle3")
    parser.add_argument("--limit", type=int, default=36)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--costs", help="ROWS:MS,... of forwards; default: measured")
    parser.add_argument(
        "--draft-ms",
        default="",
        help="METHOD:MS,... of a draft for a batch of one; grows by a half for each doubling of the batch",
    )
    asked = parser.parse_args()
    model = outpace.load(asked.model, dtype=asked.dtype)
    prompts = [one.turns[0] for one in load_prompts(asked.prompts, asked.limit)]
    if asked.costs:
        table = {int(rows): ms for rows, ms in numbers(asked.costs).items()}
    else:
        table = {rows: 1e3 * model.target.costs.seconds(rows, asked.context) for rows in (1, 2, 4, 8, 16, 32, 64, 128)}
    print("ms of a forward, by rows:", ", ".join(f"{rows}: {ms:.1f}" for rows, ms in table.items()))
    drafts = numbers(asked.draft_ms)
    sizes = [int(one) for one in asked.batches.split(",")]
    print(f"{'method':10} {'':10} " + " ".join(f"{size:>6}" for size in sizes))
    for name in asked.methods.split(","):
        rounds = record(model, name, prompts, asked.max_new_tokens)
        for label, hindsight, draft in (
            ("stated", False, drafts.get(name, 0.0)),
            ("free", False, 0.0),
            ("hindsight", True, 0.0),
        ):
            gains = []
            for size in sizes:
                costs = [interpolated(table, size + count) for count in range(min(4 * size, 64) + 13)]
                together = draft * 1.5 ** (size.bit_length() - 1)
                gains.append(gain(rounds, size, costs, together, hindsight=hindsight))
            print(f"{name:10} {label:10} " + " ".join(f"{one:6.2f}" for one in gains), flush=True)


if __name__ == "__main__":
    main()

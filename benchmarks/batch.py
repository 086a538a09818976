"""What a batch costs: a method against plain decoding with 1 to 32 requests at once.

    python benchmarks/batch.py --method pld --threads 2

Every batch size is decoded by turns with the method and plainly, ``--repeat`` times; each turn's prompts are the next
ones of the file. Shown: tokens a second of all requests together, the ratio with its interval over the turns, and
milliseconds a round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import outpace
from outpace.api.requests import request
from outpace.bench.statistics import Rate, speedup, speedup_interval
from outpace.engine.decoder import Decoder
from outpace.model import Model

BATCHES = (1, 2, 4, 8, 16, 32)


def decode(model: Model, prompts: list[str], method: str, length: int) -> tuple[Rate, float]:
    """Tokens and seconds after prefill, and milliseconds a round."""
    decoder = Decoder(model.target, model.tokenizer)
    running = [
        decoder.submit(request(model, prompt, method=method, max_new_tokens=length, ignore_eos=True))
        for prompt in prompts
    ]
    decoder.step()  # prefill and the first round
    began = perf_counter()
    before = sum(len(one.tokens) for one in running)
    rounds = 0
    while decoder.step():
        rounds += 1
    spent = perf_counter() - began
    return (sum(len(one.tokens) for one in running) - before, spent), 1e3 * spent / max(rounds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--method", default="pld")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a field 'turns'")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = outpace.load(options.model, dtype=options.dtype)
    lines: list[dict[str, Any]] = [json.loads(line) for line in options.prompts.read_text("utf-8").splitlines() if line]
    prompts = [line["turns"][0] for line in lines]
    random.Random(0).shuffle(prompts)
    decode(model, prompts[:2], options.method, 4)
    print(
        f"{'batch':>5} {'plain tok/s':>12} {'ms a round':>11} {options.method + ' tok/s':>12} {'ms a round':>11}  ratio"
    )
    at = 0
    for batch in BATCHES:
        found: dict[str, list[tuple[Rate, float]]] = {"none": [], options.method: []}
        for turn in range(options.repeat):
            chosen = [prompts[(at + i) % len(prompts)] for i in range(batch)]
            at += batch
            for name in sorted(found, reverse=bool(turn % 2)):
                found[name].append(decode(model, chosen, name, options.length))
        ours, plain = ([rate for rate, _ in found[name]] for name in (options.method, "none"))
        cells = "".join(
            f" {sum(n for (n, _), _ in runs) / sum(s for (_, s), _ in runs):>12.1f}"
            f" {statistics.fmean(ms for _, ms in runs):>11.1f}"
            for runs in (found["none"], found[options.method])
        )
        low, high = speedup_interval(ours, plain) or (0.0, 0.0)
        print(f"{batch:>5}{cells}  {speedup(ours, plain) or 0.0:.2f} [{low:.2f}, {high:.2f}]", flush=True)


if __name__ == "__main__":
    main()

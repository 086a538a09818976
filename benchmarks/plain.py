"""Plain decoding against transformers' own ``generate``: same weights, same prompts, greedy, interleaved.

    python benchmarks/plain.py --threads 2 --limit 7 --max-new-tokens 48

The ratio is ours / transformers of decode rates (tokens after the first / time after the first), with a paired
bootstrap interval over prompts.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch

import outpace
from outpace.api import prompt_ids, request
from outpace.bench.prompts import load_prompts
from outpace.bench.statistics import speedup, speedup_interval
from outpace.decoding import Decoder

Timed = tuple[float, float, float]
"""Tokens after the first, seconds after the first, seconds to the first."""


class _Clock:
    """A streamer for transformers: notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


def theirs(model: outpace.Model, ids: list[int], length: int) -> Timed:
    clock = _Clock()
    began = perf_counter()
    with torch.inference_mode():
        model.target.model.generate(  # type: ignore[attr-defined]
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
        )
    first, last = clock.times[1], clock.times[-1]  # the streamer is given the prompt first
    return len(clock.times) - 2, last - first, first - began


def ours(model: outpace.Model, text: str, length: int) -> Timed:
    decoder = Decoder(model.target)
    generation = decoder.submit(request(model, text, method="none", max_new_tokens=length, ignore_eos=True))
    decoder.run()
    metrics = generation.metrics
    return metrics.tokens - 1, metrics.decode_seconds, metrics.first_token_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = outpace.load(options.model, dtype=options.dtype)
    mine: list[Timed] = []
    other: list[Timed] = []
    for number, prompt in enumerate(load_prompts(None, options.limit)):
        ids = prompt_ids(model, prompt.turns[0])
        if number == 0:  # warm-up, not counted
            theirs(model, ids, 4), ours(model, prompt.turns[0], 4)
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            if which:
                mine.append(ours(model, prompt.turns[0], options.max_new_tokens))
            else:
                other.append(theirs(model, ids, options.max_new_tokens))
    for name, runs in (("outpace", mine), ("transformers", other)):
        rate = sum(one[0] for one in runs) / sum(one[1] for one in runs)
        print(f"{name:<14} {rate:6.1f} tokens/s   first token {1e3 * sum(one[2] for one in runs) / len(runs):6.0f} ms")
    pairs_mine, pairs_other = [one[:2] for one in mine], [one[:2] for one in other]
    interval = speedup_interval(pairs_mine, pairs_other, seed=0)
    print(f"ratio {speedup(pairs_mine, pairs_other):.2f}, 95 % interval {interval}")


if __name__ == "__main__":
    main()

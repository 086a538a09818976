"""What reading a part of the context saves, and what it costs: triforce at long contexts.

    python benchmarks/long_context.py --prompts questions.jsonl --contexts 1024 2048 4096 8000

For each context length: milliseconds of a forward that reads all committed K/V and of one that reads a part, by rows;
then plain decoding, triforce, and triforce that reads as many recent tokens instead of chunks, interleaved over
``--repeat`` texts: accepted length, the share of what the middle level hands up that is accepted, tokens a second after
prefill. The texts are the file's prompts end to end, each time beginning elsewhere, and a question about them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

import outpace
from outpace.core.metrics import total
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.targets.sub_graph import SubGraph

QUESTION = "\n\nWhat was said in the texts above? Repeat the most important sentences.\n\nAnswer:"


def texts(model: Model, prompts: Path | None, length: int, count: int, task: str) -> list[list[int]]:
    """Prompts of ``length`` tokens."""
    asked = model.tokenizer.encode(QUESTION)
    size = len(asked) if task == "question" else 64
    pieces = [model.tokenizer.encode(one.turns[0] + "\n\n") for one in load_prompts(prompts)]
    made = []
    for number in range(count):
        first = number * len(pieces) // count
        endless = itertools.cycle([*pieces[first:], *pieces[:first]])
        text: list[int] = []
        while len(text) < length - size:
            text += next(endless)
        passage = text[length // 3 : length // 3 + size]
        made.append([*text[: length - size], *(asked if task == "question" else passage)])
    return made


def least(run: Callable[[], object], repeat: int = 7) -> float:
    """Milliseconds, the least of several."""
    best = math.inf
    for _ in range(repeat):
        began = perf_counter()
        run()
        best = min(best, perf_counter() - began)
    return 1e3 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--prompts", type=Path, default=None)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8000])
    parser.add_argument("--task", choices=["question", "recite"], default="recite")
    parser.add_argument("--retrieved", type=int, default=512)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--length", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = outpace.load(options.model, dtype=options.dtype)
    target = model.target
    part = {"sink": options.sink, "num_draft_tokens": options.length, "chunk": options.chunk, "every": options.every}
    most = options.window + options.retrieved
    methods = {
        "plain": model.method("none"),
        "triforce": model.method("triforce", part | {"retrieved": options.retrieved, "window": options.window}),
        "recent only": model.method("triforce", part | {"retrieved": 0, "window": most}),
    }
    for length in options.contexts:
        room = options.tokens + options.length + 1
        made = texts(model, options.prompts, min(length, target.context_length - room), options.repeat, options.task)
        sequence = target.sequence(made[0])
        target.prefill([sequence])
        committed = target.length(sequence.kv)
        read = torch.tensor(sorted({*range(options.sink), *range(max(0, committed - most), committed)}))
        print(f"context {committed + 1}, of which the middle level reads {len(read)}")
        for rows in (1, 1 + options.length):
            batch = [(sequence, TokenTree.chain([1] * (rows - 1)))]
            full = least(partial(target.score, batch))
            some = least(partial(target.score, batch, graph=SubGraph(kv={0: read})))
            print(f"  forward over {rows} rows: {full:.2f} ms reading all, {some:.2f} ms reading the part")
        target.close(sequence.kv)
        found: dict[str, list[tuple[object, float]]] = {name: [] for name in methods}
        answers: dict[str, list[list[int]]] = {name: [] for name in methods}
        for number, prompt in enumerate(made):
            for name in sorted(methods, reverse=bool(number % 2)):
                decoder = Decoder(target)
                one = decoder.submit(Request(tuple(prompt), methods[name], max_new_tokens=options.tokens))
                decoder.run()
                found[name].append((one.metrics, one.metrics.figures()["decode_tokens_per_second"]))
                answers[name].append(list(one.tokens))
        for name, runs in found.items():
            counted = total(metrics for metrics, _ in runs)  # type: ignore[misc]
            ratio = [mine / plain for (_, mine), (_, plain) in zip(runs, found["plain"], strict=True)]
            print(
                f"  {name:<12} {statistics.fmean(rate for _, rate in runs):6.1f} tokens/s, "
                f"{math.exp(statistics.fmean(map(math.log, ratio))):.2f}x, "
                f"{counted.committed / counted.rounds:.2f} tokens a round, "
                f"{counted.accepted / max(1, counted.drafted):.0%} accepted, "
                f"{1e3 * counted.phase_seconds['draft'] / counted.rounds:.1f} ms drafting and "
                f"{1e3 * counted.phase_seconds['score'] / counted.rounds:.1f} ms verifying a round"
                + ("" if answers[name] == answers["plain"] else "  DIFFERS FROM PLAIN DECODING"),
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What a long context costs: prefill, forwards by rows and speculation, with K/V in 16 and in 8 bits.

    python benchmarks/context_costs.py --threads 2
    python benchmarks/context_costs.py --model qwen.gguf --dtype int4 --contexts 4096 8192 16384 --threads 2

Texts are the prompts of a file end to end, each time beginning elsewhere, and then a passage of them again (``--task
recite``) or a question about them. For each context length and format of K/V, interleaved: tokens/s of prefill; median
milliseconds of a forward by rows; decoding by each method after the same prefill. Every second format is compared with
the first: ratio of speeds with its 95 % interval (paired bootstrap over repetitions, or texts). Contexts that the model
does not have are cut to what it has.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import outpace
from long_context import texts
from outpace.bench.statistics import Rate, speedup, speedup_interval, total_rate
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request
from outpace.model import Model
from outpace.targets.base import Sequence

Rates = dict[str, list[Rate]]
"""Tokens and seconds of each repetition, by format of K/V."""


def compared(rates: Rates) -> str:
    """Every format's speed over the first's."""
    first, *others = rates
    cells = []
    for name in others:
        ratio, interval = speedup(rates[name], rates[first]), speedup_interval(rates[name], rates[first])
        spread = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
        cells.append("" if ratio is None else f"{name} {ratio:.2f}x{spread}")
    return ", ".join(cells)


def speeds(rates: Rates) -> list[str]:
    """Tokens/s in each format."""
    return ["" if (found := total_rate(one)) is None else f"{found:.1f}" for one in rates.values()]


def timed(work: Any) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def in_turn(names: list[str], number: int) -> list[str]:
    """The names, in the other order every second time."""
    return names[::-1] if number % 2 else names


def row(label: str, cells: list[str], note: str) -> None:
    print(f"  {label:<24}" + "".join(f"{cell:>14}" for cell in cells) + f"  {note}", flush=True)


def prefilled(models: dict[str, Model], made: list[list[int]]) -> tuple[list[dict[str, Sequence]], Rates]:
    """Each text's sequence in each format, and what its prefill took."""
    kept: list[dict[str, Sequence]] = []
    rates: Rates = {name: [] for name in models}
    for number, text in enumerate(made):
        found = {}
        for name in in_turn(list(models), number):
            target = models[name].target
            found[name] = target.sequence(text)
            seconds = timed(lambda target=target, one=found[name]: target.prefill([one]))
            rates[name].append((len(text) - 1, seconds))
        kept.append(found)
    return kept, rates


def forwards(models: dict[str, Model], kept: dict[str, Sequence], rows: int, repeat: int) -> Rates:
    rates: Rates = {name: [] for name in models}
    tree = TokenTree.chain(range(200, 199 + rows))
    for number in range(repeat + 2):
        for name in in_turn(list(models), number):
            seconds = timed(lambda name=name: models[name].target.score([(kept[name], tree)]))
            if number >= 2:  # the first ones only warm up
                rates[name].append((rows, seconds))
    return rates


def answered(model: Model, kept: Sequence, method: str, tokens: int) -> Generation:
    decoder = Decoder(model.target)
    one = decoder.submit(Request(tuple(kept.tokens), model.method(method), max_new_tokens=tokens, kept=kept))
    decoder.run()
    return one


def decoded(models: dict[str, Model], kept: list[dict[str, Sequence]], method: str, tokens: int) -> tuple[Rates, Any]:
    """Rates of decoding, and of each format: the answers, and tokens committed a forward."""
    rates: Rates = {name: [] for name in models}
    answers: dict[str, list[list[int]]] = {name: [] for name in models}
    counts = {name: [0, 0] for name in models}
    for number, sequences in enumerate(kept):
        for name in in_turn(list(models), number):
            if number == 0:
                answered(models[name], sequences[name], method, 8)  # measures the costs that the method asks for
            one = answered(models[name], sequences[name], method, tokens)
            rates[name].append((one.metrics.decode_tokens, one.metrics.decode_seconds))
            answers[name].append(list(one.tokens))
            counts[name][0] += one.metrics.committed
            counts[name][1] += one.metrics.rounds
    lengths = {name: committed / max(1, rounds) for name, (committed, rounds) in counts.items()}
    return rates, (answers, lengths)


def measure(models: dict[str, Model], length: int, options: argparse.Namespace) -> None:
    first = next(iter(models.values()))
    made = texts(first, options.prompts, length, options.texts, options.task)
    sizes = ", ".join(
        f"{name} {length * model.target.kv_bytes_per_token / 2**20:.0f} MiB" for name, model in models.items()
    )
    print(f"context of {length} tokens; K/V of one sequence: {sizes}")
    row("", list(models), "speed over the first")
    kept, rates = prefilled(models, made)
    row("prefill, tokens/s", speeds(rates), compared(rates))
    for count in options.rows:
        rates = forwards(models, kept[0], count, options.repeat)
        cells = [f"{1e3 * statistics.median(seconds for _, seconds in one):.2f}" for one in rates.values()]
        row(f"forward, T = {count}, ms", cells, compared(rates))
    plain: Any = None
    for method in options.methods.split(","):
        rates, (answers, lengths) = decoded(models, kept, method, options.tokens)
        plain = plain or (rates, answers)
        over = {name: speedup(one, plain[0][name]) for name, one in rates.items()}
        gains = ", ".join(f"{name} {gain:.2f}x" for name, gain in over.items() if gain is not None)
        per_forward = ", ".join(f"{one:.2f}" for one in lengths.values())
        differs = "" if answers == plain[1] else "; ANSWERS DIFFER FROM THE FIRST METHOD'S"
        note = f"{compared(rates)}; over the first method: {gains}; {per_forward} tokens a forward{differs}"
        row(f"{method}, tokens/s", speeds(rates), note)
    for sequences in kept:
        for name, one in sequences.items():
            models[name].target.close(one.kv)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--kv-dtype", default="auto,int8", help="formats of K/V, compared with the first of them")
    parser.add_argument("--prompts", type=Path, default=None)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16, 64])
    parser.add_argument("--methods", default="none,sam,auto")
    parser.add_argument("--task", choices=["question", "recite"], default="recite")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {kv: outpace.load(options.model, dtype=options.dtype, kv_dtype=kv) for kv in options.kv_dtype.split(",")}
    most = next(iter(models.values())).target.context_length - max(options.tokens + 32, *options.rows, 0)
    for length in dict.fromkeys(min(length, most) for length in options.contexts):
        measure(models, length, options)


if __name__ == "__main__":
    main()

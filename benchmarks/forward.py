"""What one forward costs over T rows, in each precision, beside what the machine must take for it.

    python benchmarks/forward.py --threads 2
    python benchmarks/forward.py --shape 1.5b --threads 2        # random weights, Llama-shaped
    python benchmarks/forward.py --target generic --dtypes bfloat16,float32

Times the target's forward over a chain of T - 1 draft tokens after ``--context`` tokens. The floor is
max(weight bytes / read bandwidth, operations / product limit), both measured in the same run (as ``outpace doctor``
does) before and after the curve, the better value counting; operations are those of the weight matrices. The product
limit is that of the fastest product known here, PyTorch's or the kernels' instructions. ``prefill`` runs a prompt of
``--prompt`` tokens: tokens per second, and the share of the product limit that its matrices' operations reach.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import outpace
from outpace.core.tree import TokenTree
from outpace.models.source import resolve
from outpace.targets import machine_limits
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec

ROWS = (1, 2, 4, 8, 16, 32, 64)
_LARGE: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def random_model() -> Any:
    """A Llama of 1.5 billion random bfloat16 weights, in the shape of a common model of that size."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**_LARGE), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.02)
    rotary = model.model.rotary_emb
    rotary.inv_freq = 10_000.0 ** (-torch.arange(0, 128, 2).float() / 128)
    model.tie_weights()
    return model.requires_grad_(False)


def makers(options: argparse.Namespace) -> Iterator[tuple[str, Target]]:
    """Each precision and its target, one at a time."""
    plan = read_decoder_spec(random_model()) if options.shape else None
    for name in options.dtypes.split(","):
        if plan is not None:
            yield name, DenseTarget(plan, name)
        else:
            yield name, outpace.load(options.model, dtype=name, target=options.target).target


def median_ms(work: Callable[[], object], repeat: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeat):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return 1e3 * statistics.median(times)


def curve(target: Target, context: int, repeat: int) -> dict[int, float]:
    """Milliseconds by number of rows."""
    sequence = target.sequence([(37 * i) % 20_000 + 100 for i in range(context)])
    target.prefill([sequence])
    trees = {rows: TokenTree.chain(range(200, 199 + rows)) for rows in ROWS}
    return {rows: median_ms(lambda tree=tree: target.score([(sequence, tree)]), repeat) for rows, tree in trees.items()}  # type: ignore[misc]


def prefill_seconds(target: Target, length: int, repeat: int) -> float:
    """Median seconds of running a prompt."""
    tokens = [(37 * i) % 20_000 + 100 for i in range(length + 1)]

    def run() -> None:
        sequence = target.sequence(tokens)
        target.prefill([sequence])
        target.close(sequence.kv)

    return median_ms(run, max(3, repeat // 3)) / 1e3


def limits(precision: str) -> tuple[float, float]:
    """GB/s of reading, and giga-operations/s of products."""
    kind = "int8" if precision == "int4" else precision
    return machine_limits.measure_bandwidth(), machine_limits.measure_products(kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", choices=["1.5b"], help="random weights of this size instead of a model")
    parser.add_argument("--dtypes", default=None, help="default: all that the model has")
    parser.add_argument("--target", choices=["auto", "generic"], default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt that prefill runs")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.dtypes is None:
        gguf = options.shape is None and resolve(options.model).kind == "gguf"
        options.dtypes = "float32,bfloat16,int8" + (",int4" if gguf else "") if not options.shape else "bfloat16,int8"
    found = []
    heads = "".join(f"{f'T={rows}':>14}" for rows in ROWS)
    print(f"{'milliseconds (times the floor)':<32}{heads}")
    for precision, target in makers(options):
        before = limits(precision)
        spent = curve(target, options.context, options.repeat)
        prompt = prefill_seconds(target, options.prompt, options.repeat)
        bandwidth, rate = map(max, before, limits(precision))
        row: dict[str, Any] = {"precision": precision, "ms": spent, "bandwidth": bandwidth, "products": rate}
        label = f"{precision}, {bandwidth:.0f} GB/s, {rate:.0f} Gop/s"
        cells = ""
        if isinstance(target, DenseTarget):
            weights = sum(target.formats.values())
            floors = {rows: max(target.weight_bytes / bandwidth, 2 * weights * rows / rate) / 1e6 for rows in ROWS}
            row |= {"floor_ms": floors, "weight_mb": target.weight_bytes / 1e6}
            cells = "".join(f"{spent[rows]:>7.1f} {f'({spent[rows] / floors[rows]:.2f})':>6}" for rows in ROWS)
        else:
            cells = "".join(f"{spent[rows]:>7.1f}       " for rows in ROWS)
        print(f"{label:<32}{cells}", flush=True)
        row["prefill_tokens_per_second"] = options.prompt / prompt
        share = ""
        if isinstance(target, DenseTarget):
            body = sum(target.formats.values()) - target.vocab_size * target.hidden_size  # prompts need no logits
            row["prefill_share_of_limit"] = 2 * body * options.prompt / prompt / 1e9 / rate
            share = f", {row['prefill_share_of_limit']:.0%} of the product limit"
        print(f"  prefill of {options.prompt} tokens: {options.prompt / prompt:.0f} tokens/s{share}", flush=True)
        found.append(row)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Which engine for the fast target: the matrix products of one forward in several, and our whole forward beside them.

    python benchmarks/engines.py --threads 2

For the engines of PyTorch only the matrix products of the embedded model are timed (fused projections, LM head, no
attention, norms or Python between layers), which is the least that a forward on them could cost. Ours is the whole
forward after 256 tokens. All in one run, by turns; medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import linear

import outpace
from outpace.core.tree import TokenTree

ROWS = (1, 4, 8, 16, 32)
_LAYERS, _SHAPES, _HEAD = 30, ((960, 576), (576, 576), (3072, 576), (576, 1536)), (49_152, 576)

Products = Callable[[int], None]


def matrices() -> list[Tensor]:
    """One layer after the other, so that every weight comes from memory as it would."""
    shapes = [*_SHAPES * _LAYERS, _HEAD]
    return [torch.randn(shape, dtype=torch.bfloat16) * 0.02 for shape in shapes]


def eager(weights: list[Tensor]) -> Products:
    def run(rows: int) -> None:
        for weight in weights:
            linear(torch.zeros(rows, weight.shape[1], dtype=torch.bfloat16), weight)

    return run


def packed(weights: list[Tensor]) -> Products:
    """Weights in oneDNN's own layout."""
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]

    def run(rows: int) -> None:
        for weight, plain in zip(reordered, weights, strict=True):
            inputs = torch.zeros(rows, plain.shape[1], dtype=torch.bfloat16)
            torch.ops.mkldnn._linear_pointwise(inputs, weight, None, "none", [], "")

    return run


def four_bits(weights: list[Tensor]) -> Products:
    """PyTorch's own 4-bit product: groups of 32 inputs, scales and zeros in bfloat16."""
    made = []
    for weight in weights:
        whole = torch.randint(0, 16, weight.shape, dtype=torch.int32)
        scales = torch.ones(weight.shape[1] // 32, weight.shape[0], 2, dtype=torch.bfloat16)
        made.append((torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1), scales, weight.shape[1]))

    def run(rows: int) -> None:
        for weight, scales, inputs in made:
            given = torch.zeros(rows, inputs, dtype=torch.bfloat16)
            torch.ops.aten._weight_int4pack_mm_for_cpu(given, weight, 32, scales)

    return run


def compiled(weights: list[Tensor]) -> Products:
    """torch.compile over all products, weights frozen."""

    def all_products(rows: dict[int, Tensor]) -> Tensor:
        total = torch.zeros(())
        for weight in weights:
            total = total + linear(rows[weight.shape[1]], weight)[0, 0]
        return total

    once = torch.compile(all_products, dynamic=False)

    def run(rows: int) -> None:
        once({size: torch.zeros(rows, size, dtype=torch.bfloat16) for size in (576, 1536)})

    return run


def ours(dtype: str, kind: str = "auto") -> Products:
    target = outpace.load("smollm2", dtype=dtype, target=kind).target  # type: ignore[arg-type]
    sequence = target.sequence([(37 * i) % 20_000 + 100 for i in range(256)])
    target.prefill([sequence])
    return lambda rows: void(target.score([(sequence, TokenTree.chain(range(200, 199 + rows)))]))


def void(_: object) -> None:
    """The timing wants no result."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also torch.compile (needs a C++ compiler; minutes)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    weights = matrices()
    engines: dict[str, Products] = {
        "products only: torch, bfloat16": eager(weights),
        "products only: oneDNN, packed, bfloat16": packed(weights),
        "products only: torch, 4 bits": four_bits(weights),
        "whole forward: transformers, bfloat16": ours("bfloat16", "generic"),
        "whole forward: ours, bfloat16": ours("bfloat16"),
        "whole forward: ours, int8": ours("int8"),
        "whole forward: ours, int4": ours("int4"),
    }
    if options.compile:
        engines["products only: torch.compile, bfloat16"] = compiled(weights)
    print(f"{'milliseconds':<42}" + "".join(f"{f'T={rows}':>8}" for rows in ROWS))
    found: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in engines}
    with torch.inference_mode():
        for turn in range(options.repeat + 2):
            for rows in ROWS:
                for name, run in engines.items():
                    began = perf_counter()
                    run(rows)
                    if turn >= 2:
                        found[name][rows].append(1e3 * (perf_counter() - began))
    for name, spent in found.items():
        print(f"{name:<42}" + "".join(f"{statistics.median(spent[rows]):>8.1f}" for rows in ROWS))


if __name__ == "__main__":
    main()

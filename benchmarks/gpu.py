"""The fast target on a GPU: a forward over T rows against the bandwidth floor, and decoding against transformers.

    python benchmarks/gpu.py --model path/to/model
    python benchmarks/gpu.py --model path/to/model --tokens 256

The floor is the time in which the device reads, at the bandwidth measured here, the weights that a forward reads; K/V
is left out. Decode rates are of greedy answers of one length, transformers' ``generate`` with its own defaults beside
plain decoding by outpace, in turn, tokens after the first over time after the first. Needs a GPU with CUDA.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from outpace.core.tree import TokenTree
from outpace.targets.dense.graph_target import GraphTarget

ROWS = (1, 8, 32, 64)


def settle() -> None:
    """Wait for the device, so that a clock shows what the work took."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(work: Callable[[], object], repeat: int) -> float:
    for _ in range(4):  # the first forwards of a bucket run eagerly and are captured
        work()
    times = []
    for _ in range(repeat):
        settle()
        began = perf_counter()
        work()
        settle()
        times.append(perf_counter() - began)
    return statistics.median(times)


def bandwidth(device: torch.device, megabytes: int = 2048) -> float:
    """Bytes per second of one pass of reading, the best of a few."""
    buffer = torch.ones(megabytes * 2**20 // 4, device=device)
    return buffer.nbytes / min(median_seconds(buffer.max, 5) for _ in range(3))


def prompt(target: GraphTarget, length: int) -> list[int]:
    return [(37 * index + 100) % target.vocab_size for index in range(length)]


def curve(target: GraphTarget, context: int, repeat: int, floor: float) -> None:
    """Forwards over chains, with the number of times that the floor fits into each."""
    sequence = target.sequence(prompt(target, context))
    target.prefill([sequence])
    print(f"floor {1e3 * floor:.2f} ms: {target.weight_bytes / 1e9:.2f} GB of {target.dtype} weights")
    print(f"{'T':>4} {'ms':>8} {'vs floor':>9} {'vs T=1':>7}")
    first = 0.0
    for rows in ROWS:
        tree = TokenTree.chain(range(200 % target.vocab_size, 200 % target.vocab_size + rows - 1))
        spent = median_seconds(lambda tree=tree: target.score([(sequence, tree)]), repeat)  # type: ignore[misc]
        first = first or spent
        print(f"{rows:>4} {1e3 * spent:>8.2f} {spent / floor:>8.2f}x {spent / first:>6.2f}x", flush=True)
    target.close(sequence.kv)
    print(f"forwards: {target.counts}")


def ours(target: GraphTarget, tokens: list[int], length: int) -> float:
    """Tokens per second after the first."""
    sequence = target.sequence(tokens)
    target.prefill([sequence])
    began = 0.0
    for step in range(length):
        scores = target.score([(sequence, TokenTree())])
        token = scores[0].argmax(-1)  # waits for the device
        target.commit(scores, [[]])
        sequence.tokens.append(token)
        began = began if step else perf_counter()
    spent = perf_counter() - began
    target.close(sequence.kv)
    return (length - 1) / spent


class Clock:
    """A streamer for transformers: notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


def theirs(model: Any, tokens: list[int], length: int) -> float:
    """Tokens per second after the first."""
    clock = Clock()
    ids = torch.tensor([tokens], device=model.device)
    asked = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **asked)
    return (length - 1) / (clock.times[-1] - clock.times[1])  # the streamer is given the prompt first


def race(target: GraphTarget, model: Any, context: int, length: int, repeat: int) -> None:
    rates: dict[str, list[float]] = {"outpace": [], "transformers": []}
    for turn in range(repeat + 1):
        tokens = prompt(target, context + turn)
        mine, other = ours(target, tokens, length), theirs(model, tokens, length)
        if turn:  # the first is a warm-up
            rates["outpace"].append(mine)
            rates["transformers"].append(other)
    for name, found in rates.items():
        print(f"{name:<14} {statistics.median(found):7.1f} tokens/s ({min(found):.1f} to {max(found):.1f})")
    ratio = statistics.median(rates["outpace"]) / statistics.median(rates["transformers"])
    print(f"ratio {ratio:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a GPU with CUDA, and torch sees none here", file=sys.stderr)
        return 2
    import outpace

    model = outpace.load(options.model, dtype=options.dtype, device="cuda")
    if not isinstance(model.target, GraphTarget):
        print(f"the fast target does not take this model: {model.info['note']}", file=sys.stderr)
        return 2
    speed = bandwidth(model.target.device)
    print(f"{torch.cuda.get_device_name()}: {speed / 1e9:.0f} GB/s")
    curve(model.target, options.context, options.repeat, model.target.weight_bytes / speed)
    generic: Any = outpace.load(options.model, dtype=options.dtype, device="cuda", target="generic").target
    race(model.target, generic.model, options.context, options.tokens, max(3, options.repeat // 4))
    return 0


if __name__ == "__main__":
    sys.exit(main())

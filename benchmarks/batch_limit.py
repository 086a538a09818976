"""How many prompts ``generate`` should decode side by side: tokens per second of a batch, by the limit.

python benchmarks/batch_limit.py [--model smollm2] [--prompts 32] [--tokens 48]
"""

from __future__ import annotations

import argparse
from time import perf_counter

import outpace
from outpace.engine.scheduler import Limits
from outpace.prompts.questions import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    asked = parser.parse_args()
    model = outpace.load(asked.model)
    questions = [prompt.turns[0] for prompt in load_prompts(None, asked.prompts)]
    for method in ("auto", "none"):
        model.generate(questions[:8], method=method, max_new_tokens=8)  # costs are measured, threads have started
        for limit in (1, 2, 4, 8, 16, 32):
            model.shared.limits = Limits(max_batch=limit)
            began = perf_counter()
            results = model.generate(questions, method=method, max_new_tokens=asked.tokens, progress=False)
            tokens = sum(len(one.tokens) for one in results)
            print(f"{method:5} {limit:3} at once: {tokens / (perf_counter() - began):6.1f} tokens/s")


if __name__ == "__main__":
    main()

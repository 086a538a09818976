"""What ``auto`` loses where its head is worth nothing: with a head of random weights, against ``sam`` alone.

    python benchmarks/untrained_head.py --limit 14 --size base

``auto`` is built anew for every prompt, as requests without a namespace have it; so what is measured is what it
remembers of the head across requests, and what keeping the head in step with the target takes. Ratios are of decode
rates, with 95 % intervals by a paired bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch

import outpace
from outpace.api.calls import generate
from outpace.bench.statistics import Rate, speedup, speedup_interval
from outpace.heads.checkpoint import facts, new_head, save
from outpace.heads.kinds import find_kind, plan
from outpace.model import Model
from outpace.prompts.questions import load_prompts

VOCABULARY = 8000


def untrained(model: Model, kind: str, size: str, folder: Path) -> Path:
    """A head of random weights for this model, saved."""
    config = plan(find_kind(kind), facts(model.target, model.name), size=size, vocabulary=VOCABULARY)
    save(new_head(config, model.target, torch.arange(VOCABULARY), 0), folder, {})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kind", default="eagle3")
    parser.add_argument("--size", default="base")
    parser.add_argument("--limit", type=int, default=14)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    model = outpace.load(asked.model)
    with tempfile.TemporaryDirectory() as room:
        head = untrained(model, asked.kind, asked.size, Path(room) / "head")
        methods = {"sam": None, "auto": head}
        rates: dict[str, list[Rate]] = {name: [] for name in methods}
        asked_for: list[float] = []
        prompts = load_prompts(None, asked.limit)
        for number, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
            order = list(methods)
            random.Random(number).shuffle(order)
            for name in order:
                found = generate(
                    model,
                    prompt.turns[0],
                    method=name,
                    max_new_tokens=asked.max_new_tokens,
                    temperature=asked.temperature,
                    seed=number,
                    head=methods[name],
                ).metrics
                if number:
                    speed = found["decode_tokens_per_second"]
                    rates[name].append((found["tokens"] - 1, (found["tokens"] - 1) / speed))
                    if name == "auto":
                        asked_for.append(found["drafting_parts"][asked.kind])
    ratio, interval = speedup(rates["auto"], rates["sam"]), speedup_interval(rates["auto"], rates["sam"])
    assert ratio is not None and interval is not None
    label = f"auto with an untrained {asked.kind} head ({asked.size}) / sam"
    print(f"{label}: {ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]")
    print("share of rounds in which the head's tokens were drafted, prompt by prompt:")
    print(" ".join(f"{share:.1%}" for share in asked_for))


if __name__ == "__main__":
    main()

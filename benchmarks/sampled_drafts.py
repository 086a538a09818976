"""Tokens a round of sampled requests, by settings of a method, and the speed that follows at given costs.

    python benchmarks/sampled_drafts.py questions.jsonl --temperatures 0.8 'eagle3={}' 'eagle3={"mode": "tree"}'

Decoding goes by the given costs as well, so that nothing depends on what else the machine does: counts are compared,
not times. Costs are those of ``benchmarks/acceptance_ceiling.py``.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import outpace
from outpace.api.requests import request
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts
from outpace.targets.costs import Costs, Scorer


class Given(Costs):
    """Costs that are given in milliseconds: of forwards by rows, of a level of the head, and of every round."""

    def __init__(self, forward: dict[int, float], root: float, level: float, other: float) -> None:
        self._rows, self._ms = list(forward), [ms + other for ms in forward.values()]
        self.root, self.level = root, level

    def seconds(self, rows: int, context: int = 0) -> float:
        return float(np.interp(rows, self._rows, self._ms)) / 1e3

    def once(self, name: str, measure: Callable[[], float]) -> float:
        return (self.level if name.startswith("level") else self.root + self.level) / 1e3

    def beside(self, model: Scorer, name: str) -> Costs:
        return self

    def steps_of(self, draft_tokens: int, depth: int) -> float:
        """A round in autoregressive steps; all its draft tokens are counted as the head's."""
        draft = (self.root + self.level * (depth - 1)) / 1e3 if draft_tokens else 0.0
        return (self.seconds(1 + draft_tokens) + draft) / self.seconds(1)


def counted(model: Model, costs: Given, method: Method, prompts: list[Prompt], length: int, heat: float) -> str:
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    rounds = drafted = 0
    for seed, prompt in enumerate(prompts):
        asked = request(model, prompt.turns[0], method=method, max_new_tokens=length, temperature=heat, seed=seed)
        decoder = Decoder(model.target, model.tokenizer)
        generation = decoder.submit(replace(asked, trace=True))
        decoder.run()
        for one in generation.rounds:
            rounds, drafted = rounds + 1, drafted + len(one.tree)
            groups[prompt.category][0] += len(one.committed)
            groups[prompt.category][1] += costs.steps_of(len(one.tree), max(one.tree.depths, default=0))
    tokens, steps = (sum(values) for values in zip(*groups.values(), strict=True))
    split = " | ".join(f"{name} {many / cost:.2f}" for name, (many, cost) in groups.items())
    return f"{tokens / rounds:.3f} | {drafted / rounds:.2f} | {tokens / steps:.3f} | {split}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("methods", nargs="+", metavar="METHOD=SETTINGS", help="settings as JSON; 'rule' names a rule")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--draft-model", help="by default the one that is shipped for the model")
    parser.add_argument("--limit", type=int, default=18)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperatures", default="0.8", help="comma-separated")
    parser.add_argument("--costs", default="1:3.8,2:3.9,4:4.4,8:6.2,16:10.9,64:42", help="milliseconds by rows")
    parser.add_argument("--root", type=float, default=0.6)
    parser.add_argument("--level", type=float, default=0.4)
    parser.add_argument("--other", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = outpace.load(options.model, dtype=options.dtype)
    forward = {int(rows): float(ms) for rows, ms in (one.split(":") for one in options.costs.split(","))}
    model.target.costs = costs = Given(forward, options.root, options.level, options.other)
    prompts = load_prompts(options.prompts, options.limit)
    print("| temperature | method | tokens a round | drafted | speed | by task |")
    for temperature in map(float, options.temperatures.split(",")):
        for label in options.methods:
            name, _, text = label.partition("=")
            settings = json.loads(text or "{}")
            rule = settings.pop("rule", None)
            method = model.method(name, settings, rule=rule, draft_model=options.draft_model)
            found = counted(model, costs, method, prompts, options.max_new_tokens, temperature)
            print(f"| {temperature:g} | {label} | {found} |", flush=True)


if __name__ == "__main__":
    main()

"""Populations measured: error of particles against their number, and what beams and particles take.

    python benchmarks/populations.py --model smollm2 --prompts 4 --out out/populations.json

1. On a toy target: total variation between the law of ``smcsd``'s answer and the target's, and the root mean square
   error of the estimated probability of a text, by the number of particles.
2. With the model: tokens per second of all particles together beside as many independent samples that run at once
   (the same K/V), and rounds per token of ``dsbd`` beside beam search. ``--draft-model``; by default the shipped one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import outpace
from outpace.certify.distributions import autoregressive_distribution
from outpace.certify.exact import tiny_context
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.engine.scheduler import Limits
from outpace.methods.registry import build
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.targets.table import random_table

PROMPT, VOCABULARY, LENGTH, SEED = (0, 1, 2), 4, 3, 21


def toy_errors(counts: list[int], runs: int) -> list[dict[str, float]]:
    """Of the answer and of the estimate, for every number of particles."""
    params = SamplingParams(temperature=1.0)
    target = autoregressive_distribution(random_table(VOCABULARY, SEED), VOCABULARY, params, PROMPT, LENGTH)
    text = max(target, key=lambda one: target[one])
    found = []
    for count in counts:
        answers: Counter[tuple[int, ...]] = Counter()
        squares = []
        for seed in range(runs):
            context = tiny_context(VOCABULARY, SEED)
            method = build("smcsd", context, {"num_particles": count, "num_draft_tokens": 2})
            decoder = Decoder(context.target)
            sampled = SamplingParams(temperature=1.0, seed=seed)
            one = decoder.submit(Request(PROMPT, method, sampled, max_new_tokens=LENGTH))
            decoder.run()
            answers[tuple(one.tokens)] += 1
            estimate = sum(math.exp(each.log_weight) for each in one.hypotheses if each.tokens == text) / count
            squares.append((estimate - target[text]) ** 2)
        distance = 0.5 * sum(abs(answers[one] / runs - target.get(one, 0.0)) for one in {*answers, *target})
        found.append({"particles": count, "answer_tv": distance, "estimate_rmse": math.sqrt(statistics.mean(squares))})
    return found


def timed(model: Model, prompts: list[str], **options: Any) -> dict[str, Any]:
    """Seconds, tokens of all sequences and mean tokens a round, over all prompts one after the other."""
    tokens = 0
    seconds = 0.0
    lengths = []
    for prompt in prompts:
        began = perf_counter()
        found = model.generate(prompt, **options)
        seconds += perf_counter() - began
        listed = found if isinstance(found, list) else [found]
        population = listed[0].population
        tokens += sum(len(one.tokens) for one in population or listed)
        lengths += [one.metrics["mean_acceptance_length"] for one in listed]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_round": statistics.mean(lengths),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    report: dict[str, Any] = {"settings": {name: str(value) for name, value in vars(given).items()}}
    report["toy"] = toy_errors([1, 2, 4, 8, 16, 32], given.runs)
    for row in report["toy"]:
        print(row)
    model = outpace.load(given.model)
    model.shared.limits = Limits(max_batch=max(8, given.particles))
    draft = {} if given.draft_model is None else {"draft_model": outpace.load(given.draft_model)}
    texts = [prompt.turns[0] for prompt in load_prompts(None, given.prompts)]
    sampled = {"temperature": 1.0, "max_new_tokens": given.max_new_tokens, "seed": 0, "ignore_eos": True}
    greedy = {"max_new_tokens": given.max_new_tokens, "ignore_eos": True, "num_beams": given.beams}
    particles = {"num_particles": given.particles}
    runs: dict[str, dict[str, Any]] = {
        "independent samples": {"n": given.particles, "method": "none", **sampled},
        "independent samples, drafted": {"n": given.particles, "method": "draft-model", **draft, **sampled},
        "particles": {"method": "smcsd", "settings": particles, **draft, **sampled},
        "beams": greedy,
        "beams, dsbd": {"method": "dsbd", **draft, **greedy},
        "stochastic beams": {"num_beams": given.beams, **sampled},
        "stochastic beams, dsbd": {"method": "dsbd", "num_beams": given.beams, **draft, **sampled},
    }
    report["model"] = {}
    for name, options in runs.items():
        timed(model, texts[:1], **{**options, "max_new_tokens": 8})  # what is measured once is measured here
        report["model"][name] = timed(model, texts, **options)
        print(name, report["model"][name])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How far masking is from the model's distribution over valid answers, and what weighting by future validity does.

    python benchmarks/future_validity.py --toy                      # exact enumeration on toy targets
    python benchmarks/future_validity.py --model smollm2            # choices and tries on a model

Toy targets: whole answers of autoregressive decoding through the decoder are enumerated, masked, estimated one step
ahead and weighted exactly, and compared with the conditional distribution, every valid answer's own probability over
their sum. ``dp``: the same weights by dynamic programming over the automaton and the table.

A model: the conditional distribution over texts is that of the tree of all spellings, scored by the target; masked and
one-step distributions follow from the same scores. ``--samples`` answers are drawn with a method and compared with it.
``spelled``: beginnings of all their spellings; ``nodes``: those that were scored; ``ms``: what finding the weights
takes before the first token.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import mean, median
from time import perf_counter
from typing import Any

import outpace
from outpace.api.requests import request
from outpace.certify.distributions import (
    Arrivals,
    OutputDistribution,
    autoregressive_distribution,
    conditional_distribution,
    enumerated_distribution,
)
from outpace.certify.exact import tiny_context
from outpace.certify.fit import g_test
from outpace.certify.toy_languages import SHORT, Words, dyck, json_object
from outpace.constraints.automaton import AutomatonValidity
from outpace.constraints.compiler import compiled
from outpace.core.constraint import Constraint, tokens_of
from outpace.core.future_validity import ConstraintWeighting, ValidityNode
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.future_validity import weigh
from outpace.engine.request import Request
from outpace.methods.registry import build
from outpace.targets.table import random_table

PROMPT = (0, 1, 0)
TOYS: dict[str, tuple[Constraint, int]] = {
    "choices": (Words(((0,), (1, 1), (1, 0, 0), (2, 1))), 4),
    "trie": (SHORT, 4),
    "Dyck words, depth 2, 6 tokens": (dyck(2, 6), 3),
    "JSON, 6 tokens": (json_object(1, 6), 6),
}
QUESTIONS: list[tuple[str, str, Any]] = [
    ("choices", "Is the sky green? Answer yes or no.", ["yes", "no"]),
    (
        "choices",
        "Is this review positive, negative or neutral? 'It broke on the first day.'",
        ["positive", "negative", "neutral"],
    ),
    ("choices", "What is the capital of the Netherlands?", ["Amsterdam", "Rotterdam", "Utrecht"]),
    ("trie", "What should I cook with?", ["red", "red wine", "red wine vinegar", "rice", "rice vinegar"]),
    ("trie", "When did the Second World War end?", outpace.Grammar.regex("in (19[0-4]|20)[0-9]")),
]
COLUMNS = ("masked", "fvo-one-step", "fvo-exact")


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def enumerated(size: int, seed: int, params: SamplingParams, stops: frozenset[int]) -> OutputDistribution:
    """Whole answers of autoregressive decoding through the decoder."""

    def batch() -> Arrivals:
        context = tiny_context(size, seed)
        return context.target, [Request(PROMPT, build("none", context), params, 12, stops)], 0

    return enumerated_distribution(batch)[0]


def toys(tables: int) -> None:
    print(f"| toy language | valid | {' | '.join(COLUMNS)} | dp |")
    print("|---|---|---|---|---|---|")
    for name, (constraint, size) in TOYS.items():
        away: dict[str, list[float]] = defaultdict(list)
        for seed in range(tables):
            stops, table = frozenset({size - 1}), random_table(size, seed)
            params = SamplingParams(temperature=1.0, constraint=constraint)
            true = conditional_distribution(table, size, params, PROMPT, 12, stops)
            for kind in COLUMNS:
                held = replace(params, constraint_weighting=kind)
                away[kind].append(distance(enumerated(size, seed, held, stops), true))
            solved = AutomatonValidity(constraint, model_of(table), size, PROMPT, 2, stops)
            dp = replace(params, constraint=solved.constrained())
            away["dp"].append(distance(autoregressive_distribution(table, size, dp, PROMPT, 12, stops), true))
            away["valid"].append(solved.validity)
        shown = [f"{mean(away[kind]):.3f} (at most {max(away[kind]):.3f})" for kind in COLUMNS[:2]]
        exact = [f"{max(away[kind]):.0e}" for kind in ("fvo-exact", "dp")]
        print(f"| {name} | {mean(away['valid']):.2g} | {' | '.join(shown + exact)} |", flush=True)


def model_of(table: Callable[[tuple[int, ...]], Any]) -> Callable[[tuple[int, ...]], Any]:
    return lambda context: table(context).double().log_softmax(-1)


# -------------------------------------------------------------------------------------------------------- a model

Shares = Callable[[ValidityNode], dict[int, float]]


def masked(node: ValidityNode) -> dict[int, float]:
    return {token: math.exp(log) for token, log in node.log_probs.items()}


def conditioned(node: ValidityNode) -> dict[int, float]:
    ends = {token: math.exp(node.log_probs[token]) for token in node.ends}
    return ends | {at: math.exp(node.log_probs[at] + one.log_validity) for at, one in node.children.items()}


def one_step(node: ValidityNode) -> dict[int, float]:
    """As the decoder's estimate has it, of the beginnings that were scored."""
    weighting, probs = ConstraintWeighting(), masked(node)
    ranked = sorted(probs, key=lambda token: -probs[token])
    mass, chosen = 0.0, list[int]()
    for token in ranked[: weighting.topk]:
        mass += probs[token] / sum(probs.values())
        chosen.append(token)
        if mass >= weighting.coverage:
            break
    behind = {
        token: 1.0 if token in node.ends else sum(masked(node.children[token]).values())
        for token in chosen
        if token in node.ends or token in node.children
    }
    covered = sum(probs[token] for token in behind)
    others = sum(probs[token] * behind[token] for token in behind) / covered if covered else 1.0
    return {token: probs[token] * behind.get(token, others) for token in probs}


def answers(root: ValidityNode, shares: Shares) -> Iterator[tuple[tuple[int, ...], float]]:
    """Whole answers without their stop token, and their probabilities; what leads out of the tree is left out."""
    todo: list[tuple[tuple[int, ...], float, ValidityNode]] = [((), 1.0, root)]
    while todo:
        path, weight, node = todo.pop()
        found = shares(node)
        total = sum(found.values())
        ended = sum(share for token, share in found.items() if token in node.ends)
        if ended:
            yield path, weight * ended / total
        for token, child in node.children.items():
            if found.get(token):
                todo.append(((*path, token), weight * found[token] / total, child))


def texts(model: outpace.Model, root: ValidityNode, shares: Shares) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for path, weight in answers(root, shares):
        found[model.tokenizer.decode(path)] += weight
    return found


def spelled(model: outpace.Model, grammar: Any, most: int = 20_000) -> str:
    """How many beginnings the spellings of all answers have."""
    size, found = model.target.vocab_size, 0
    todo: list[Any] = [compiled(outpace.Grammar.read(grammar), model.tokenizer).begin()]
    while todo and found < most:
        state = todo.pop()
        after = [state.advance(int(token)) for token in tokens_of(state.allowed(size), size)]
        found += len(after)
        todo += after
    return f"{found:,}" if found < most else f"over {most:,}"


def seconds_to_weigh(model: outpace.Model, asked: Request) -> float:
    """Median seconds that finding the weights takes, after the prompt was read."""
    times = []
    for _ in range(5):
        sequence = model.target.sequence(asked.prompt, asked.params, stop_ids=asked.stop_ids)
        model.target.prefill([sequence])
        began = perf_counter()
        weigh(model.target, sequence)
        times.append(perf_counter() - began)
        model.target.close(sequence.kv)
    return median(times)


def on_model(name: str, samples: int, method: str, temperature: float) -> None:
    model = outpace.load(name)
    print(
        f"| on {name} | answers | valid | spelled | nodes | ms | masked | fvo-one-step | {samples} samples, {method} |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for kind, question, grammar in QUESTIONS:
        decoder = Decoder(model.target, model.tokenizer)
        generations = []
        options: dict[str, Any] = {"grammar": grammar, "constraint_weighting": "fvo-exact", "method": method}
        took = seconds_to_weigh(model, request(model, question, temperature=temperature, **options))
        for number in range(samples):
            one = request(model, question, seed=number, temperature=temperature, max_new_tokens=32, **options)
            generations.append(decoder.submit(one))
            if number % 16 == 15 or number + 1 == samples:
                decoder.run()
        first = generations[0]
        first.raise_error()
        root, weighed = first.sequence.sampler.validity, first.weighed
        assert isinstance(root, ValidityNode) and weighed is not None and weighed.validity is not None
        true = texts(model, root, conditioned)
        drawn = Counter(one.text for one in generations)
        p_value, _ = g_test([drawn[text] for text in true], [samples * share for share in true.values()])
        empirical = distance({text: count / samples for text, count in drawn.items()}, true)
        noise = sum(math.sqrt(share * (1 - share) / samples * 2 / math.pi) for share in true.values()) / 2
        away = [distance(texts(model, root, shares), true) for shares in (masked, one_step)]
        row = [f"{kind}: {question}", str(len(true)), f"{weighed.validity:.2g}", spelled(model, grammar)]
        row += [str(weighed.nodes), f"{1e3 * took:.0f}", *(f"{one:.3f}" for one in away)]
        row.append(f"{empirical:.3f} (noise {noise:.3f}), p = {p_value:.2f}")
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="enumerate toy targets")
    parser.add_argument("--tables", type=int, default=10, help="toy targets for each language")
    parser.add_argument("--model", default="", help="a model for choices and tries")
    parser.add_argument("--samples", type=int, default=400, help="answers drawn for each question")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    if args.toy:
        toys(args.tables)
    if args.model:
        on_model(args.model, args.samples, args.method, args.temperature)


if __name__ == "__main__":
    main()

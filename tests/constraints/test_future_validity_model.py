"""Future validity on the embedded model: choices and tries, against every spelling scored alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import pytest

import outpace
from outpace.api.requests import request
from outpace.certify.fit import g_test
from outpace.constraints import Grammar, compiled
from outpace.core.constraint import tokens_of
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation

pytestmark = pytest.mark.model

GRAMMARS: dict[str, tuple[str, Any]] = {
    "choices": ("Is the sky green? Answer yes or no.", ["yes", "no", "maybe"]),
    "trie": ("What should I cook with?", ["red", "red wine", "rice"]),
}


@pytest.fixture(scope="module")
def model() -> outpace.Model:
    return outpace.load("smollm2")


def spelled(model: outpace.Model, grammar: Any) -> list[tuple[int, ...]]:
    """Every way to write every answer in tokens."""
    size = model.target.vocab_size
    todo: list[tuple[tuple[int, ...], Any]] = [((), compiled(Grammar.read(grammar), model.tokenizer).begin())]
    found = []
    while todo:
        path, state = todo.pop()
        found += [path] if state.complete else []
        todo += [((*path, int(one)), state.advance(int(one))) for one in tokens_of(state.allowed(size), size)]
    return found


def exact(model: outpace.Model, question: str, grammar: Any, temperature: float) -> dict[str, float]:
    """The distribution over texts given that they are valid: each spelling scored as a chain of its own."""
    prompt = request(model, question).prompt
    sequence = model.target.sequence(prompt)
    model.target.prefill([sequence])
    shares: dict[str, float] = defaultdict(float)
    for path in spelled(model, grammar):
        logits = model.target.score([(sequence, TokenTree.chain(path))])[0].logits
        logs = (logits.double() / temperature).log_softmax(-1)
        log = sum(float(logs[at, token]) for at, token in enumerate(path))
        ends = sum(math.exp(float(logs[len(path), token])) for token in model.eos_ids)
        shares[model.tokenizer.decode(path)] += math.exp(log) * ends
    model.target.close(sequence.kv)
    total = sum(shares.values())
    return {text: share / total for text, share in shares.items()}


def decoded(model: outpace.Model, question: str, count: int, **options: Any) -> list[Generation]:
    decoder = Decoder(model.target, model.tokenizer)
    found = []
    for seed in range(count):
        found.append(decoder.submit(request(model, question, seed=seed, max_new_tokens=16, **options)))
        if seed % 16 == 15 or seed + 1 == count:
            decoder.run()
    for one in found:
        one.raise_error()
    return found


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.slow
def test_sampled_answers_follow_the_conditional_distribution(model: outpace.Model, name: str) -> None:
    question, grammar = GRAMMARS[name]
    true = exact(model, question, grammar, 1.0)
    for method, samples in (("none", 192), ("auto", 192)):
        drawn = decoded(
            model, question, samples, grammar=grammar, weighting="fvo-exact", temperature=1.0, method=method
        )
        counts = Counter(one.text for one in drawn)
        p_value, _ = g_test([counts[text] for text in true], [samples * share for share in true.values()])
        assert p_value > 1e-3, (method, counts, true)
        assert {one.constraint_figures["constraint_weighting"] for one in drawn} == {"fvo-exact"}


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_first_token_has_its_share_of_the_conditional_distribution(model: outpace.Model, name: str) -> None:
    """The distribution that the target samples from, against every spelling scored alone."""
    question, grammar = GRAMMARS[name]
    [one] = decoded(model, question, 1, grammar=grammar, weighting="fvo-exact", temperature=0.7, method="none")
    root = one.sequence.sampler.validity
    assert root is not None and root.weights is not None
    shares: dict[str, float] = defaultdict(float)
    todo: list[tuple[tuple[int, ...], float, Any]] = [((), 1.0, root)]
    while todo:
        path, weight, node = todo.pop()
        logs = {
            token: node.log_probs[token] + (0.0 if token in node.ends else node.child(token).log_validity)
            for token in (*node.ends, *node.children)
        }
        for token, log in logs.items():
            share = weight * math.exp(log - node.log_validity)
            if token in node.ends:
                shares[model.tokenizer.decode(path)] += share
            else:
                todo.append(((*path, token), share, node.child(token)))
    true = exact(model, question, grammar, 0.7)
    assert one.weighed is not None and one.weighed.error is not None and one.weighed.error <= 1e-6
    assert dict(shares) == pytest.approx(true, abs=1e-5)


def test_greedy_answers_are_the_same_with_every_method(model: outpace.Model) -> None:
    for weighting in ("fvo-exact", "fvo-one-step"):
        for question, grammar in GRAMMARS.values():
            answers = {
                method: model.generate(question, grammar=grammar, weighting=weighting, method=method).tokens
                for method in ("none", "grammar", "auto")
            }
            assert answers["grammar"] == answers["auto"] == answers["none"]


def test_a_schema_is_estimated_where_it_cannot_be_listed(model: outpace.Model) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
    options: dict[str, Any] = {"grammar": schema, "temperature": 1.0, "seed": 1, "max_new_tokens": 40}
    told = model.generate("Invent a person.", constraint_weighting="fvo(max_nodes=96)", **options)
    assert told.metrics["constraint_weighting"] == "fvo-one-step"
    assert told.metrics["future_validity"]["nodes"] > 0 and told.metrics["ttft_ms"] < 10_000
    assert 0.0 <= told.metrics["future_validity"]["error"] <= 1.0
    assert told.text.startswith('{"name": "')
    with pytest.raises(BadInput, match="cannot be had exactly: they are too many for 96 scored"):
        model.generate("Invent a person.", constraint_weighting="fvo-exact(max_nodes=96)", **options)

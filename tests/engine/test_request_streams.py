"""A request's random numbers: repeated by its seed, and never those that sampled an earlier answer, by whatever
way that answer comes back: a namespace, a reference, a prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outpace.certify.distributions import Output, OutputDistribution, run_once
from outpace.core.chance import Chance, ChanceSource, Enumeration, SeededChance
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods.registry import Context, build
from outpace.targets.table import TableTarget, random_table
from support import autoregressive_distribution
from weights_support import with_drafts

PARAMS = SamplingParams(temperature=1.0)
PROMPT = (0, 1, 2, 0, 1)
TABLE = random_table(3, 4)
TARGET = TableTarget(3, TABLE)
MEMORIES: dict[str, dict[str, Any]] = {
    "cacheback": {"max_nodes": 3, "depth": 2, "follower": 1, "leader": 2, "branches": 2},
    "lookahead": {"window": 2, "ngram": 2, "guesses": 2, "max_nodes": 3, "depth": 2},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def method(name: str, **settings: Any) -> Method:
    return build(name, with_drafts(TARGET, TARGET), settings)


class Keyed:
    """The streams of one request within an enumeration, under the key that they have in the field."""

    def __init__(self, source: ChanceSource, own: SeededChance) -> None:
        self._source, self._key = source, own.key.hex()

    def at(self, position: int, purpose: str) -> Chance:
        return self._source.at(position, f"{self._key}|{purpose}")


def total_variation(
    make: Callable[[], Method], first: Request, then: Callable[[Method, Output], Request], length: int
) -> float:
    """How far the answers to the second of two requests are from autoregressive decoding, its prompt given."""

    def program(chance: ChanceSource) -> tuple[Output, Output]:
        one = make()
        sampled = run_once(lambda: (TARGET, [replaced(first, one)], 0), lambda own: Keyed(chance, own))
        second = then(one, tuple(sampled.tokens))
        answer = run_once(lambda: (TARGET, [second], 0), lambda own: Keyed(chance, own))
        return second.prompt, tuple(answer.tokens)

    found: dict[Output, OutputDistribution] = defaultdict(lambda: defaultdict(float))
    for (prompt, answer), weight in Enumeration.outcomes(program):
        found[prompt][answer] += weight
    far = 0.0
    for prompt, answers in found.items():
        mass = sum(answers.values())
        plain = autoregressive_distribution(TABLE, PARAMS, prompt, length)
        far += sum(abs(answers.get(one, 0.0) - mass * plain.get(one, 0.0)) for one in {*plain, *answers}) / 2
    return far


def replaced(request: Request, one: Method) -> Request:
    return Request(request.prompt, one, PARAMS, request.max_new_tokens, namespace=request.namespace)


def request(one: Method, prompt: Output = PROMPT, length: int = 3, **options: Any) -> Request:
    return Request(prompt, one, options.pop("params", PARAMS), length, **options)


@pytest.mark.parametrize(("name", "prompt", "length"), [("cacheback", PROMPT, 3), ("lookahead", (2, 2), 4)])
def test_a_second_request_of_a_namespace_and_seed_is_sampled_from_the_target(
    name: str, prompt: Output, length: int
) -> None:
    def make() -> Method:
        return method(name, **MEMORIES[name])

    first = request(make(), prompt, length, namespace="ours")
    assert total_variation(make, first, lambda one, _: request(one, prompt, namespace="ours"), 3) < 1e-6


@pytest.mark.parametrize("way", ["reference", "prompt"])
def test_an_earlier_answer_that_the_user_brings_back_does_not_bias_the_next(way: str) -> None:
    """Prompt lookup drafts it: it must not be judged with the numbers that sampled it."""

    def make() -> Method:
        return method("pld")

    def then(one: Method, answer: Output) -> Request:
        if way == "reference":
            return request(one, references=((0, 1, *answer),))
        return request(one, prompt=(1, *answer, 1))

    assert total_variation(make, request(make()), then, 3) < 1e-6


def key(generation: Generation) -> bytes:
    assert isinstance(generation.sequence.chance, SeededChance)
    return generation.sequence.chance.key


def test_the_numbers_of_a_namespace_go_on_through_batches_and_decoders() -> None:
    one = method("cacheback")
    decoder = Decoder(TARGET)
    together = [decoder.submit(request(one, namespace=name)) for name in ("ours", "ours", "theirs", "")]
    decoder.run()
    later = [Decoder(TARGET).submit(request(one, namespace=name)) for name in ("ours", "theirs", "", "")]
    other_seed = Decoder(TARGET).submit(request(one, namespace="ours", params=SamplingParams(temperature=1.0, seed=1)))
    texts = (PROMPT,)
    numbers = [0, 1, 0, 0, 2, 1, 0, 0]
    assert [key(one) for one in (*together, *later)] == [SeededChance(0, texts, number).key for number in numbers]
    assert key(other_seed) == SeededChance(1, texts, 0).key
    fresh = Decoder(TARGET).submit(request(method("cacheback"), namespace="ours"))
    assert key(fresh) == SeededChance(0, texts, 0).key, "another method keeps nothing of these"


@pytest.mark.parametrize("name", ["none", "pld", "draft-model", "cacheback", "hsd"])
def test_prompt_references_and_seed_repeat_an_answer(name: str) -> None:
    one, target = method(name), TARGET
    references = ((0, 1, 1, 2), (2, 2))

    def answers(one: Method, *namespaces: str) -> list[list[int]]:
        found = []
        for namespace in namespaces:
            decoder = Decoder(target)
            generation = decoder.submit(request(one, length=24, references=references, namespace=namespace))
            decoder.run()
            found.append(generation.tokens)
        return found

    again = answers(one, "", "", "new")
    assert again[0] == again[1] == again[2]
    if name == "cacheback":
        history = answers(method(name), *["ours"] * 4)
        assert history == answers(method(name), *["ours"] * 4), "the same requests in the same order"
        assert len(set(map(tuple, history))) > 1, "and they are different answers"


def test_one_seed_gives_independent_answers_to_different_prompts() -> None:
    """As a bench asks them: the same question marked in ten ways, at a target that ignores the marks."""
    flat = TableTarget(3, lambda tokens: torch.zeros(3))
    one, answers = build("none", Context(flat)), set()
    for mark in range(3**3):
        decoder = Decoder(flat)
        generation = decoder.submit(request(one, (mark // 9, mark // 3 % 3, mark % 3), 20))
        decoder.run()
        answers.add(tuple(generation.tokens))
    assert len(answers) == 27

"""Decoding under a grammar: masked autoregressive decoding is the reference for every method, exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from biases import ForbiddenDropped, ForbiddenLast, Unmasked, UnmaskedTree, chain, replaced, wide
from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import RecursiveRejection
from outpace.certify.distributions import Arrivals, autoregressive_distribution, distance, enumerated_distribution
from outpace.certify.exact import tiny_context
from outpace.certify.letters import Letters
from outpace.constraints import Grammar, compiled
from outpace.controllers.base import Budget
from outpace.core.chance import ChanceSource, Enumeration
from outpace.core.constraint import Constraint, bits_of
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.grammar_drafter import GrammarDrafter
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.registry import Context, build, find, methods
from outpace.targets.base import TreeScores
from outpace.targets.table import TableTarget, random_table

PIECES = {
    "choices": ("a", "b", "ab", None),
    "regex": ("a", "b", "ab", None),
    "brackets": ("(", ")", "()", None),
    "json": ('{"a": ', "1", "}", "11", None),
}
GRAMMARS = {
    "choices": Grammar.choice(["ab", "ba", "bab", "b"]),
    "regex": Grammar.regex("(ab|b)*a"),
    "brackets": Grammar.lark('start: pair*\npair: "(" pair* ")"'),
    "json": Grammar.schema({"type": "object", "properties": {"a": {"enum": [1, 11, 111]}}, "required": ["a"]}),
}
LENGTH = {"choices": 3, "regex": 3, "brackets": 3, "json": 5}
PROMPT = (0, 1, 2, 0, 1)


def table_of(name: str, seed: int) -> tuple[int, Any]:
    size = len(PIECES[name])
    return size, random_table(size, seed)


def request_for(
    name: str, make: Callable[[Context], Method], seed: int, params: SamplingParams
) -> tuple[Context, Request]:
    pieces = PIECES[name]
    size = len(pieces)
    context = tiny_context(size, seed, pieces, pieces[::-1])
    held = replace(params, constraint=compiled(GRAMMARS[name], Letters(pieces)))
    asked = Request(PROMPT, make(context), held, max_new_tokens=LENGTH[name], stop_ids=frozenset({size - 1}))
    return context, asked


def error(name: str, make: Callable[[Context], Method], seed: int, params: SamplingParams | None = None) -> float:
    """The largest difference of an output's probability from masked autoregressive decoding's."""
    params = params or SamplingParams(temperature=1.0)

    def batch() -> Arrivals:
        context, asked = request_for(name, make, seed, params)
        return context.target, [asked], 0

    context, asked = request_for(name, make, seed, params)
    assert isinstance(context.target, TableTarget)
    plain = autoregressive_distribution(
        context.target.table, context.target.vocab_size, asked.params, PROMPT, LENGTH[name], asked.stop_ids
    )
    assert sum(plain.values()) == pytest.approx(1.0)
    found, _ = enumerated_distribution(batch)
    return distance(found, plain)


def method(name: str, settings: dict[str, Any] | None = None, rule: str | None = None) -> Callable[[Context], Method]:
    return lambda context: build(name, context, {**find(name).tiny, **(settings or {})}, rule)


CASES: dict[str, Callable[[Context], Method]] = {
    "none": method("none"),
    "grammar": method("grammar"),
    "auto": method("auto"),
    "pld": method("pld"),
    "merge": method(
        "merge", {"parts": ("grammar", "draft-model"), "settings": {"draft-model": {"num_draft_tokens": 2}}}
    ),
    "draft-model": method("draft-model", {"num_draft_tokens": 2}),
    "rsd": method("rsd"),
    "eagle3": method("eagle3"),
    "medusa": method("medusa"),
    "recycling": method("recycling"),
}


LONG = ("rsd", "eagle3")
"""Methods with so many outcomes that one grammar is enough for every run."""


@pytest.mark.parametrize(
    ("name", "grammar"),
    [
        pytest.param(name, one, marks=[pytest.mark.slow] if name in LONG and one != "choices" else [])
        for name in CASES
        for one in GRAMMARS
    ],
)
def test_outputs_have_the_distribution_of_masked_autoregressive_decoding(name: str, grammar: str) -> None:
    assert error(grammar, CASES[name], seed=3) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize(
    "name", [one.name for one in methods() if one.lossless and one.build.__module__.startswith("outpace.")]
)
def test_every_method(name: str, grammar: str) -> None:
    assert error(grammar, method(name), seed=5) < 1e-6  # all can be enumerated: none is left out


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("name", CASES)
def test_greedy_answers_are_those_of_masked_autoregressive_decoding(name: str, grammar: str) -> None:
    assert error(grammar, CASES[name], 7, SamplingParams()) == 0.0


# ------------------------------------------------------------------------------------------------ planted biases


def parents_mask(honest: Callable[..., Any], self: TreeDistribution, node: int) -> Any:
    """Every node is masked as the root is."""
    return honest(self, -1)


@dataclass(slots=True)
class Shared:
    """A grammar whose states are one object that moves: (ab)* over tokens 0 and 1."""

    last: int = 1

    @property
    def complete(self) -> bool:
        return self.last == 1

    def allowed(self, size: int) -> Any:
        return bits_of([1 - self.last], size)

    def advance(self, token: int) -> Shared | None:
        if token != 1 - self.last:
            return None
        self.last = token
        return self

    def forced(self) -> Seq[int]:
        return ()


class Forked(Shared):
    def advance(self, token: int) -> Shared | None:
        return Forked(token) if token == 1 - self.last else None


class Alternating:
    """The grammar (ab)* with states of one of the kinds above."""

    def __init__(self, kind: type[Shared]) -> None:
        self.kind = kind

    def begin(self) -> Any:
        return self.kind()

    def accepts(self, text: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("name", "make", "biased"),
    [
        ("a draft model without a grammar", chain(Unmasked), False),
        ("forbidden draws are dropped", chain(ForbiddenDropped), True),
        ("a sampled tree without a grammar", wide(UnmaskedTree), False),
        ("forbidden draws are ranked last", wide(ForbiddenLast), True),
    ],
)
def test_what_becomes_of_forbidden_draws(name: str, make: Callable[[Context], Method], biased: bool) -> None:
    worst = max(error("choices", make, seed) for seed in (8, 9))
    assert (worst > 1e-4) == biased, (name, worst)


def test_a_mask_of_another_path_is_caught() -> None:
    # Chains whose draft model knows nothing of the grammar, so that only the target's masks are wrong.
    assert error("regex", chain(Unmasked), 8) < 1e-6
    with replaced(TreeDistribution, "place", parents_mask):
        try:
            wrong = error("regex", chain(Unmasked), 8) > 1e-4
        except BadInput as caught:  # the sampler itself refuses what the grammar does not allow
            wrong = "does not allow" in str(caught)
        assert wrong


@pytest.mark.parametrize(("kind", "biased"), [(Forked, False), (Shared, True)])
def test_states_that_are_not_forked_are_caught(kind: type[Shared], biased: bool) -> None:
    table = random_table(3, 4)

    def batch() -> Arrivals:
        target = TableTarget(3, table)
        constraint: Constraint = Alternating(kind)
        params = SamplingParams(temperature=1.0, constraint=constraint)
        context = replace(tiny_context(3, 4), target=target)
        asked = Request(PROMPT, chain(Unmasked)(context), params, max_new_tokens=4, stop_ids=frozenset({2}))
        return target, [asked], 0

    params = SamplingParams(temperature=1.0, constraint=Alternating(Forked))
    plain = autoregressive_distribution(table, 3, params, PROMPT, 4, frozenset({2}))
    try:
        wrong = distance(enumerated_distribution(batch)[0], plain) > 1e-4
    except BadInput:  # a state that has moved on allows nothing of what follows
        wrong = True
    assert wrong == biased


# ------------------------------------------------------------------------------------------------------- answers


def answered(grammar: Grammar, pieces: Seq[str | None], method_name: str = "auto", **more: Any) -> Any:
    """One greedy answer of a toy target; the last piece is the stop token."""
    words = Letters(pieces)
    size = len(pieces)
    context = replace(tiny_context(size, 1), tokenizer=words)
    params = SamplingParams(constraint=compiled(grammar, words))
    asked = Request(
        (0, 1), build(method_name, context), params, **{"max_new_tokens": 12, "stop_ids": frozenset({size - 1}), **more}
    )
    decoder = Decoder(context.target, words)
    generation = decoder.submit(asked)
    decoder.run()
    return generation


def test_an_answer_ends_where_its_grammar_is_complete() -> None:
    found = answered(GRAMMARS["json"], PIECES["json"])
    assert found.finish_reason == "stop"
    assert json.loads(found.text)["a"] in (1, 11, 111)
    without_stop = answered(GRAMMARS["json"], PIECES["json"], stop_ids=frozenset())
    assert without_stop.finish_reason == "stop"
    assert without_stop.text == found.text


def test_an_answer_that_is_too_long_says_so() -> None:
    found = answered(Grammar.regex("(a|b){9}"), PIECES["regex"], max_new_tokens=3)
    assert found.finish_reason == "length"
    assert len(found.tokens) == 3


def test_a_grammar_that_no_token_goes_on_with_ends_the_answer_in_words() -> None:
    found = answered(Grammar.regex("a\u00e9"), PIECES["regex"])
    assert found.finish_reason == "error"
    assert "none of the vocabulary's tokens goes on as the grammar demands" in str(found.error)


def test_a_stop_string_inside_of_what_is_forced_is_refused() -> None:
    with pytest.raises(BadInput, match="stop string 'a' is in the text that the grammar demands"):
        answered(Grammar.choice(["ab"]), PIECES["choices"], stop_strings=("a",))
    found = answered(Grammar.choice(["ba", "bb"]), PIECES["choices"], stop_strings=("bb", "a"))
    assert found.finish_reason == "error"
    assert "cut the answer before it was complete" in str(found.error)


def test_values_and_keys_that_nothing_has_followed_yet_are_guessed() -> None:
    pieces = ['{"kind": "', "r", "re", "red", "g", "green", '"', "}", ', "size": 1', ", ", None]
    words = Letters(pieces)
    kinds = {"type": "object", "properties": {"kind": {"enum": ["red", "green"]}, "size": {"const": 1}}}
    state: Any = compiled(Grammar.schema({**kinds, "required": ["kind"], "additionalProperties": False}), words).begin()

    def longest(text: str) -> list[str | None]:
        nonlocal state
        for token in words.encode(text):
            state = state.advance(token)
        return [pieces[token] for token in state.longest(len(words))]

    assert longest('{"kind": "') == ["green", "red"]
    assert longest('red"') == [', "size": 1', "}"]
    target = TableTarget(len(words), random_table(len(words), 1))
    params = SamplingParams(constraint=compiled(Grammar.choice(["red", "green"]), words))
    drafter, sequence = GrammarDrafter(), target.sequence((0,), params, stop_ids=frozenset({len(pieces) - 1}))
    tree = drafter.propose(drafter.begin(sequence), Budget(2, 4))
    assert [pieces[token] for token in tree.tokens[:2]] == ["green", "red"]


def test_a_limit_of_the_engine_at_a_stop_string_ends_that_answer_alone() -> None:
    class Limited:
        def __init__(self) -> None:
            self.begin = compiled(Grammar.choice(["ab", "ba"]), Letters(PIECES["choices"])).begin

        def accepts(self, text: str) -> bool:
            raise BadInput("the grammar is too complex to go on")

    words = Letters(PIECES["choices"])
    context = replace(tiny_context(4, 1), tokenizer=words)
    decoder = Decoder(context.target, words)
    requests = [
        Request((0, 1), build("none", context), params, max_new_tokens=3, stop_strings=("a", "b", "c"))
        for params in (SamplingParams(constraint=Limited()), SamplingParams())
    ]
    cut, beside = map(decoder.submit, requests)
    decoder.run()
    assert cut.finish_reason == "error" and "too complex to go on" in str(cut.error)
    assert beside.error is None


@dataclass(slots=True)
class Failing:
    """Answers of the letter a, of which an engine fails to say what it forces, or whether they may end."""

    complete = False

    def begin(self) -> Failing:
        return self

    def allowed(self, size: int) -> Any:
        return bits_of([0, 1], size)

    def advance(self, token: int) -> Failing:
        return self

    def forced(self) -> Seq[int]:
        raise BadInput("the grammar is too complex to go on")

    def accepts(self, text: str) -> bool:
        return True


@pytest.mark.parametrize("name", ["grammar", "copy-decode"])
def test_a_failure_to_say_what_is_forced_ends_no_round(name: str) -> None:
    words = Letters(PIECES["choices"])
    context = replace(tiny_context(4, 1), tokenizer=words)
    decoder = Decoder(context.target, words)
    method = replace(build(name, context), prepare=None)
    params = SamplingParams(constraint=Failing())
    requests = [decoder.submit(Request((0, 1), one, params, max_new_tokens=3)) for one in (method, method)]
    decoder.run()
    assert [one.finish_reason for one in requests] == ["length", "length"]


def test_stop_strings_behind_a_whole_answer_are_harmless() -> None:
    found = answered(Grammar.regex("a|ab+"), PIECES["regex"], stop_strings=("b",))
    assert found.finish_reason == "stop"
    assert found.text == "a"


@pytest.fixture
def counted() -> Iterator[list[int]]:
    """Nodes of the trees that are scored."""
    sizes: list[int] = []

    def score(honest: Callable[..., Any], self: TableTarget, batch: Any, *given: Any, **more: Any) -> Any:
        sizes.extend(len(one) for _, one in batch)
        return honest(self, batch, *given, **more)

    honest = TableTarget.score
    TableTarget.score = lambda self, *given, **more: score(honest, self, *given, **more)  # type: ignore[method-assign]
    yield sizes
    TableTarget.score = honest  # type: ignore[method-assign]


def test_deterministic_drafts_against_the_grammar_are_not_scored(counted: list[int]) -> None:
    # The prompt repeats "a b", so that prompt lookup drafts an "a", which the first grammar never allows.
    words = Letters(PIECES["regex"])
    context = replace(tiny_context(4, 1), tokenizer=words)
    for grammar, drafted in ((Grammar.regex("b{3,}"), False), (Grammar.regex("(a|b){3,}"), True)):
        counted.clear()
        params = SamplingParams(constraint=compiled(grammar, words), logit_bias={1: 50.0})
        asked = Request((0, 1, 0, 1, 0, 1), build("pld", context, {"num_draft_tokens": 1}), params, max_new_tokens=2)
        decoder = Decoder(context.target, words)
        decoder.submit(asked)
        decoder.run()
        assert any(counted) == drafted


def test_deterministic_parts_are_pruned_beside_one_that_samples(counted: list[int]) -> None:
    words = Letters(PIECES["regex"])
    context = tiny_context(4, 1, PIECES["regex"], PIECES["regex"])
    chains = {"pld": {"num_draft_tokens": 1}, "draft-model": {"num_draft_tokens": 1}}
    method = build("merge", context, {"parts": tuple(chains), "settings": chains})
    for grammar, most in ((Grammar.regex("b{3,}"), 1), (Grammar.regex("(a|b){3,}"), 2)):
        counted.clear()
        params = SamplingParams(temperature=1.0, constraint=compiled(grammar, words), logit_bias={1: 50.0})
        decoder = Decoder(context.target, words)
        decoder.submit(Request((0, 1, 0, 1, 0, 1), method, params, max_new_tokens=2))
        decoder.run()
        assert counted[-1] == most  # before it the draft model reads the prompt


def test_a_rule_that_is_given_a_forbidden_draw_keeps_the_target() -> None:
    """Its token has probability 0 in p, and its row of q counts all the same: by every outcome of the rule's chance."""
    tree_of = TokenTree.chain([1], [QRow(torch.tensor([0.5, 0.5, 0.0]))])
    params = SamplingParams(temperature=1.0, constraint=Alternating(Forked))
    target = TableTarget(3, random_table(3, 4))
    sequence = target.sequence(PROMPT, params, stop_ids=frozenset({2}))
    target.prefill([sequence])
    forbidden = target.score([(sequence, tree_of)])[0]
    allowed = target.score([(sequence, TokenTree.chain([0], [QRow(torch.tensor([0.5, 0.5, 0.0]))]))])[0]
    p = [forbidden.distribution.at(-1)[token] for token in range(3)]
    assert p[1] == 0.0 and p[0] > 0.0 < p[2]

    def judged(scores: TreeScores) -> Callable[[ChanceSource], Verdict]:
        return lambda chance: RecursiveRejection().accept([scores], [None], [chance.at(0, "accept")])[0]

    sums = [0.0, 0.0, 0.0]
    for scores in (forbidden, allowed):  # either token is drawn half of the time
        for verdict, weight in Enumeration.outcomes(judged(scores)):
            assert scores is allowed or verdict.path == ()
            sums[0 if verdict.path else verdict.token] += weight / 2
    assert sums == pytest.approx(p, abs=1e-6)

"""Future validity: the model's distribution over whole answers, given that they are valid, by every method and rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from biases import replaced
from outpace.acceptance.registry import all_rules
from outpace.certify.distributions import (
    Arrivals,
    OutputDistribution,
    autoregressive_distribution,
    conditional_distribution,
    distance,
    enumerated_distribution,
)
from outpace.certify.exact import NeverTwice, tiny_context
from outpace.certify.toy_grammar import Brackets
from outpace.certify.toy_languages import SHORT, Words, dyck, json_object
from outpace.constraints.automaton import AutomatonValidity
from outpace.core.constraint import Constraint, Masks, tokens_of
from outpace.core.errors import BadInput
from outpace.core.future_validity import ConstraintWeighting, TokenWeights, WeightedState
from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.tree_distribution import TreeDistribution
from outpace.engine.answer_tree import AnswerTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods.registry import Context, build, find
from outpace.targets.base import TreeScores
from outpace.targets.table import random_table

PROMPT = (0, 1, 0)
PIECES = ("a", "b", "ab", "c", "ba", "ca")
LANGUAGES: dict[str, tuple[Constraint, int]] = {
    "choices": (Words(((0,), (1, 1), (1, 0, 0), (2, 1))), 4),
    "trie": (SHORT, 4),
    "dyck": (dyck(2, 4), 3),
    "json": (json_object(1, 5), 6),
}
"""Each with the size of the vocabulary, whose last token ends answers."""
LENGTH = 6
SAMPLED = SamplingParams(temperature=0.8, constraint_weighting="fvo-exact")


def asked_of(name: str, params: SamplingParams) -> tuple[int, SamplingParams, frozenset[int]]:
    constraint, size = LANGUAGES[name]
    return size, replace(params, constraint=constraint), frozenset({size - 1})


def method(name: str, rule: str | None = None, **settings: Any) -> Callable[[Context], Method]:
    return lambda context: build(name, context, {**find(name).tiny, **settings}, rule)


def found(language: str, make: Callable[[Context], Method], seed: int, params: SamplingParams) -> OutputDistribution:
    size, held, stops = asked_of(language, params)

    def batch() -> Arrivals:
        context = tiny_context(size, seed, PIECES)
        return context.target, [Request(PROMPT, make(context), held, max_new_tokens=LENGTH, stop_ids=stops)], 0

    return enumerated_distribution(batch)[0]


def conditional(language: str, seed: int, params: SamplingParams) -> OutputDistribution:
    size, held, stops = asked_of(language, params)
    return conditional_distribution(random_table(size, seed), size, held, PROMPT, LENGTH, stops)


def error(language: str, make: Callable[[Context], Method], seed: int, params: SamplingParams = SAMPLED) -> float:
    return distance(found(language, make, seed, params), conditional(language, seed, params))


METHODS: dict[str, Callable[[Context], Method]] = {
    "none": method("none"),
    "grammar": method("grammar"),
    "pld": method("pld"),
    "draft-model": method("draft-model", num_draft_tokens=2),
    "rsd": method("rsd"),
    "merge": method("merge", parts=("grammar", "draft-model"), settings={"draft-model": {"num_draft_tokens": 1}}),
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", METHODS)
def test_answers_have_the_models_distribution_given_that_they_are_valid(name: str, language: str) -> None:
    assert error(language, METHODS[name], 3) < 1e-6


@pytest.mark.parametrize("language", LANGUAGES)
def test_masking_alone_is_another_distribution(language: str) -> None:
    masked = found(language, METHODS["none"], 3, replace(SAMPLED, constraint_weighting="masked"))
    assert distance(masked, conditional(language, 3, SAMPLED)) > 0.01


RULES = [rule.name for rule in all_rules() if rule.lossless and rule.__module__.startswith("outpace.")]
DRAFTERS = ("draft-model", "sampled-tree", "rsd", "pld", "eagle3")


MASKED = replace(SAMPLED, constraint_weighting="masked")


def masked(language: str, make: Callable[[Context], Method], seed: int) -> float:
    """The largest difference from masked autoregressive decoding, which knows nothing of future validity."""
    size, held, stops = asked_of(language, MASKED)
    plain = autoregressive_distribution(random_table(size, seed), size, held, PROMPT, LENGTH, stops)
    return distance(found(language, make, seed, MASKED), plain)


@pytest.mark.parametrize(("weighting", "language"), [("fvo-exact", "trie"), ("masked", "choices"), ("masked", "dyck")])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow
def test_every_lossless_rule(rule: str, weighting: str, language: str) -> None:
    ran = 0
    for drafter in DRAFTERS:
        settings = {"num_draft_tokens": 2} if drafter == "draft-model" else {}
        try:
            worst = (masked if weighting == "masked" else error)(language, method(drafter, rule, **settings), 5)
        except BadInput as refused:  # the rule does not take such drafts
            assert "rule" in str(refused)
            continue
        assert worst < 1e-6, drafter
        ran += 1
    assert ran or rule == "greedy"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.3, repetition_penalty=1.4, frequency_penalty=0.3),
        SamplingParams(temperature=0.5, logit_bias={0: 1.0, 1: -2.0}),
        SamplingParams(temperature=1.0, logit_bias={0: -math.inf}),
        SamplingParams(temperature=1.0, processors=(NeverTwice(),)),
    ],
)
def test_bias_penalties_and_processors_belong_to_the_model(params: SamplingParams) -> None:
    weighted = replace(params, constraint_weighting="fvo-exact")
    assert error("trie", METHODS["draft-model"], 4, weighted) < 1e-6


def next_given_valid(whole: OutputDistribution, path: tuple[int, ...]) -> dict[int, float]:
    """The distribution of the token after ``path``, from that of whole answers."""
    shares: dict[int, float] = {}
    for output, weight in whole.items():
        if output[: len(path)] == path and len(output) > len(path):
            shares[output[len(path)]] = shares.get(output[len(path)], 0.0) + weight
    total = sum(shares.values())
    return {token: weight / total for token, weight in shares.items()}


@pytest.mark.parametrize("language", LANGUAGES)
def test_greedy_takes_the_likeliest_token_of_the_weighted_distribution(language: str) -> None:
    for seed in range(3):
        whole = conditional(language, seed, replace(SAMPLED, temperature=1.0))
        path: tuple[int, ...] = ()
        while after := next_given_valid(whole, path):
            path = (*path, max(after, key=after.__getitem__))
        for name in ("none", "grammar", "draft-model"):
            greedy = replace(SAMPLED, temperature=0.0)
            assert found(language, METHODS[name], seed, greedy) == {path: pytest.approx(1.0)}


def test_top_k_cuts_the_weighted_distribution() -> None:
    whole = conditional("trie", 6, SAMPLED)
    expected: OutputDistribution = {(): 1.0}
    for _ in range(4):
        longer: OutputDistribution = {}
        for path, weight in expected.items():
            after = sorted(next_given_valid(whole, path).items(), key=lambda pair: -pair[1])[:2]
            if not after:
                longer[path] = weight
            for token, share in after:
                longer[(*path, token)] = weight * share / sum(one for _, one in after)
        expected = longer
    cut = found("trie", METHODS["draft-model"], 6, replace(SAMPLED, top_k=2))
    assert distance(cut, expected) < 1e-6


# -------------------------------------------------------------------------------------------------- one step ahead


def one_step(size: int, seed: int, held: SamplingParams, stops: frozenset[int], length: int) -> OutputDistribution:
    """Autoregressive decoding with the estimate, as it is defined, from the table alone; all allowed tokens are
    candidates."""
    assert held.constraint is not None
    table, masks = random_table(size, seed), Masks(held.constraint, stops, size)
    expected: OutputDistribution = {(): 1.0}
    for step in range(length):
        longer: OutputDistribution = {}
        for path, weight in expected.items():
            if len(path) < step or (path and path[-1] in stops):
                longer[path] = weight
                continue
            place = masks.begin()
            for token in path:
                place = masks.advance(place, token)
            p = (table((*PROMPT, *path)) / held.temperature).double().softmax(-1)
            shares = {}
            allowed = masks.allowed(place)
            assert allowed is not None and not isinstance(allowed, BadInput)
            for token in tokens_of(allowed, size).tolist():
                behind = 1.0
                if token not in stops:
                    after = masks.allowed(masks.advance(place, token))
                    assert after is not None and not isinstance(after, BadInput)
                    further = (table((*PROMPT, *path, token)) / held.temperature).double().softmax(-1)
                    behind = float(further[tokens_of(after, size)].sum())
                shares[token] = float(p[token]) * behind
            for token, share in shares.items():
                longer[(*path, token)] = weight * share / sum(shares.values())
        expected = longer
    return expected


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", ["none", "grammar", "draft-model", "rsd"])
def test_the_estimate_is_a_distribution_that_rejection_keeps(name: str, language: str) -> None:
    weighting = ConstraintWeighting("fvo-one-step", coverage=1.0)
    size, held, stops = asked_of(language, replace(SAMPLED, constraint_weighting=weighting))
    expected = one_step(size, 3, held, stops, LENGTH)
    assert distance(found(language, METHODS[name], 3, held), expected) < 1e-6


def test_candidates_of_the_estimate_depend_on_the_path_alone() -> None:
    weighting = ConstraintWeighting("fvo-one-step", topk=2, coverage=0.7)
    params = replace(SAMPLED, constraint_weighting=weighting)
    plain = found("json", METHODS["none"], 3, params)
    for name in ("grammar", "draft-model"):
        assert distance(found("json", METHODS[name], 3, params), plain) < 1e-6


def total_variation(one: OutputDistribution, other: OutputDistribution) -> float:
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def test_the_estimate_is_closer_than_the_mask_on_average() -> None:
    away = {"masked": 0.0, "fvo-one-step": 0.0}
    for seed in range(8):
        true = conditional("trie", seed, SAMPLED)
        for kind in away:
            away[kind] += total_variation(
                found("trie", METHODS["none"], seed, replace(SAMPLED, constraint_weighting=kind)), true
            )
    assert away["fvo-one-step"] < away["masked"]


# ------------------------------------------------------------------------------------------------- planted biases


@contextmanager
def target_not_weighted() -> Iterator[None]:
    """Drafts are weighted, and the target is only masked."""

    def masked(self: TreeScores) -> TreeDistribution:
        if self._distribution is None:
            sampler = self.sequence.sampler.fork()
            assert sampler.params.constraint is not None
            sampler.grammar = Masks(sampler.params.constraint, sampler.stop_ids, sampler.vocab_size)
            sampler.place = getattr(sampler.place, "inner", sampler.place)
            self._distribution = TreeDistribution(sampler, self.tree, self.logits)
        return self._distribution

    honest = TreeScores.distribution
    TreeScores.distribution = property(masked)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        TreeScores.distribution = honest  # type: ignore[method-assign]


def of_another_path(honest: Callable[..., Any], self: WeightedState, token: int) -> Any:
    """h of the first answer that goes on, whatever the token."""
    after = honest(self, token)
    children = getattr(self.at, "children", {})
    return after if after is None or not children else replace(after, at=next(iter(children.values())))


def stale(honest: Callable[..., Any], self: Sampler, tokens: Any) -> None:
    """After a commit the weights are still those of the beginning."""
    before = self.place
    honest(self, tokens)
    if isinstance(before, WeightedState) and isinstance(self.place, WeightedState):
        self.place = replace(self.place, at=before.at)


BIASES: dict[str, Callable[[], Any]] = {
    "draft weighted, target not": target_not_weighted,
    "h of another path": lambda: replaced(WeightedState, "advance", of_another_path),
    "h stale after a commit": lambda: replaced(Sampler, "extend", stale),
}


@pytest.mark.parametrize("bias", BIASES)
def test_planted_biases_are_caught(bias: str) -> None:
    assert error("trie", METHODS["draft-model"], 8) < 1e-6
    with BIASES[bias]():
        try:
            wrong = error("trie", METHODS["draft-model"], 8) > 1e-4
        except BadInput as caught:  # weights of another beginning leave nothing to follow
            wrong = "no token can follow" in str(caught)
    assert wrong


# -------------------------------------------------------------------------------------------- dynamic programming


@pytest.mark.parametrize("language", LANGUAGES)
def test_dynamic_programming_over_automaton_and_table(language: str) -> None:
    size, held, stops = asked_of(language, SAMPLED)
    assert held.constraint is not None
    table = random_table(size, 3)

    def model(context: tuple[int, ...]) -> torch.Tensor:
        return (table(context).double() / SAMPLED.temperature).log_softmax(-1)

    solved = AutomatonValidity(held.constraint, model, size, PROMPT, 2, stops)
    context = tiny_context(size, 3, PIECES)
    decoder = Decoder(context.target)
    one = decoder.submit(Request(PROMPT, build("none", context), held, max_new_tokens=LENGTH, stop_ids=stops))
    decoder.run()
    assert one.weighed is not None and one.weighed.validity == pytest.approx(solved.validity, rel=1e-6)
    weighted = replace(SAMPLED, constraint_weighting="masked")
    plain = autoregressive_distribution(
        table, size, replace(weighted, constraint=solved.constrained()), PROMPT, LENGTH, stops
    )
    assert distance(plain, conditional(language, 3, SAMPLED)) < 1e-6


def test_words_too_long_to_list_are_solved_too() -> None:
    """Dyck words of up to 40 tokens: more than ten thousand million; h is the probability of a valid answer."""
    constraint, size, stops = dyck(3, 40), 3, frozenset({2})
    table = random_table(size, 1)
    solved = AutomatonValidity(constraint, lambda path: table(path).double().log_softmax(-1), size, PROMPT, 2, stops)
    assert len(solved.states) < 2000
    generator, valid, draws = torch.Generator().manual_seed(0), 0, 20_000
    for _ in range(draws):  # the model's own answers
        path, depth = [*PROMPT], 0
        while True:
            token = int(torch.multinomial(table(tuple(path)).softmax(-1), 1, generator=generator))
            if token == 2:
                valid += depth == 0 and len(path) > len(PROMPT)
                break
            depth += 1 if token == 0 else -1
            path.append(token)
            if not 0 <= depth <= 3 or len(path) - len(PROMPT) > 40:
                break
    spread = math.sqrt(solved.validity * (1 - solved.validity) / draws)
    assert abs(valid / draws - solved.validity) < 4 * spread


def test_loops_are_solved_by_iteration_and_endless_automata_refused() -> None:
    table = random_table(3, 2)

    def model(path: tuple[int, ...]) -> torch.Tensor:
        return table(path).double().log_softmax(-1)

    loops = AutomatonValidity(Brackets(), model, 4 - 1, PROMPT, 1, frozenset({2}))
    assert 0.0 < loops.validity < 1.0 and loops.rounds > 2
    with pytest.raises(BadInput, match="more than 20 states"):
        AutomatonValidity(dyck(3, 40), model, 3, PROMPT, 2, frozenset({2}), most=20)


# ------------------------------------------------------------------------------------------------ what is reported


def decoded(params: SamplingParams, stops: frozenset[int] = frozenset({3}), **more: Any) -> Generation:
    context = tiny_context(4, 1)
    decoder = Decoder(context.target)
    one = decoder.submit(Request(PROMPT, build("none", context), params, max_new_tokens=8, stop_ids=stops, **more))
    decoder.run()
    return one


def test_results_say_what_was_sampled() -> None:
    exact = decoded(replace(SAMPLED, constraint=SHORT))
    assert exact.constraint_figures["constraint_weighting"] == "fvo-exact"
    told = exact.constraint_figures["future_validity"]
    assert 0.0 < told["validity"] < 1.0 and told["nodes"] >= 10 and told["error"] == 0.0
    assert exact.metrics.figures()["constraint_weighting"] == {"fvo-exact": 1}
    masked = decoded(SamplingParams(temperature=1.0, constraint=SHORT))
    assert masked.constraint_figures == {
        "constraint_weighting": "masked",
        "future_validity": None,
        "grammar_complete": True,
    }
    assert decoded(SamplingParams()).constraint_figures["constraint_weighting"] is None


def test_where_exact_weights_cannot_be_had() -> None:
    few = ConstraintWeighting("fvo-exact", max_nodes=4)
    refused = decoded(replace(SAMPLED, constraint=SHORT, constraint_weighting=few))
    assert refused.finish_reason == "error" and not refused.tokens
    assert "cannot be had exactly" in str(refused.error)
    endless = decoded(replace(SAMPLED, constraint=Brackets(), constraint_weighting=replace(few, max_nodes=40)))
    assert "cannot be had exactly" in str(endless.error)
    estimated = decoded(replace(SAMPLED, constraint=SHORT, constraint_weighting=replace(few, kind="fvo")))
    assert estimated.constraint_figures["constraint_weighting"] == "fvo-one-step"
    assert estimated.finish_reason == "stop"
    assert 0.0 <= estimated.constraint_figures["future_validity"]["error"] <= 1.0


def test_an_endless_language_is_exact_within_the_tolerance() -> None:
    """Long answers are improbable, so that those left out make no difference; their number has no bound."""
    stops = frozenset({2})
    table = random_table(3, 0)
    solved = AutomatonValidity(
        Brackets(), lambda path: (table(path) / 0.8).double().log_softmax(-1), 3, PROMPT, 2, stops
    )
    context = tiny_context(3, 0)
    params = replace(SAMPLED, constraint=Brackets(), constraint_weighting="fvo-exact(tolerance=1e-4)")
    decoder = Decoder(context.target)
    one = decoder.submit(Request(PROMPT, build("none", context), params, max_new_tokens=1, stop_ids=stops))
    decoder.run()
    assert one.weighed is not None and one.weighed.error is not None and 0.0 < one.weighed.error <= 1e-4
    assert one.weighed.validity == pytest.approx(solved.validity, rel=2e-4)


def test_a_coarser_tolerance_needs_fewer_nodes_and_keeps_its_bound() -> None:
    size, stops = 3, frozenset({2})
    held = replace(SAMPLED, constraint=dyck(3, 14), temperature=0.7)
    true = conditional_distribution(random_table(size, 1), size, held, PROMPT, 20, stops)
    sizes = []
    for tolerance in (0.3, 0.05, 1e-6):
        params = replace(held, constraint_weighting=ConstraintWeighting("fvo-exact", tolerance=tolerance))
        context = tiny_context(size, 1)
        decoder = Decoder(context.target)
        one = decoder.submit(Request(PROMPT, build("none", context), params, max_new_tokens=1, stop_ids=stops))
        while one.weighed is None and decoder.step():  # a forward in each step
            pass
        assert one.weighed is not None and one.weighed.error is not None and one.weighed.error <= tolerance
        sizes.append(one.weighed.nodes)
        root = one.sequence.sampler.validity
        answers: OutputDistribution = {}
        todo: list[tuple[tuple[int, ...], float, Any]] = [((), 1.0, root)]
        while todo:
            path, weight, node = todo.pop()
            for token, log in node.log_probs.items():
                if token in node.ends:
                    answers[(*path, token)] = weight * math.exp(log)
                elif token in node.children:
                    todo.append(((*path, token), weight * math.exp(log), node.children[token]))
        total = sum(answers.values())
        assert total_variation({key: value / total for key, value in answers.items()}, true) <= one.weighed.error + 1e-9
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_answers_that_are_very_improbable_are_found() -> None:
    """At low temperatures the probability of a valid answer may be below the smallest number."""
    cold = decoded(SamplingParams(temperature=0.001, constraint=SHORT, constraint_weighting="fvo-exact", seed=1))
    assert cold.error is None and cold.weighed is not None
    assert cold.weighed.validity == 0.0 and cold.weighed.error == 0.0
    assert len(cold.tokens) == 3


def test_samples_of_one_prompt_share_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AnswerTree] = []
    grown = AnswerTree.grow

    def grow(tree: AnswerTree) -> Generator[None, None, bool]:
        made.append(tree)
        return grown(tree)

    monkeypatch.setattr(AnswerTree, "grow", grow)
    context = tiny_context(4, 1)
    decoder = Decoder(context.target)
    params, stops = replace(SAMPLED, constraint=SHORT), frozenset({3})
    for one in (replace(params, seed=1), replace(params, seed=2), replace(params, temperature=0.5)):
        decoder.submit(Request(PROMPT, build("none", context), one, max_new_tokens=8, stop_ids=stops))
    decoder.run()
    assert len(made) == 2
    for name in ("ann", "bob"):  # that there is a tree shows in the time that an answer takes
        asked = Request(PROMPT, build("none", context), params, max_new_tokens=8, stop_ids=stops, tenant=name)
        decoder.submit(asked)
        decoder.submit(asked)
    decoder.run()
    assert len(made) == 4


@pytest.mark.parametrize("kind", ["fvo-exact", "fvo-one-step"])
def test_a_request_that_was_preempted_goes_on_with_its_weights(kind: str) -> None:
    for seed in range(6):
        answers = []
        for preempted in (False, True):
            context = tiny_context(3, 2)
            decoder = Decoder(context.target)
            params = replace(SAMPLED, constraint=dyck(2, 6), constraint_weighting=kind, seed=seed)
            asked = Request(PROMPT, build("none", context), params, max_new_tokens=8, stop_ids=frozenset({2}))
            one = decoder.submit(asked)
            decoder.step()
            if preempted and one.finish_reason is None:
                decoder.preempt(one)
                decoder.resume(one)
            decoder.run()
            answers.append(one.tokens)
        assert answers[0] == answers[1]


def test_others_go_on_while_a_tree_grows_and_a_request_that_ends_grows_no_more() -> None:
    context = tiny_context(3, 2)
    decoder = Decoder(context.target)
    params = replace(SAMPLED, constraint=dyck(3, 12), constraint_weighting="fvo-exact", seed=1)

    def submit(params: SamplingParams) -> Generation:
        method = build("none", context)
        return decoder.submit(Request(PROMPT, method, params, max_new_tokens=16, stop_ids=frozenset({2})))

    alone = submit(params)
    decoder.run()
    first, sample, beside = submit(replace(params, temperature=0.9)), submit(replace(params, temperature=0.9)), None
    for _ in range(2):
        decoder.step()
    assert first.weighed is None and sample.weighed is None and not first.tokens
    beside = submit(SamplingParams(logit_bias={0: 100.0}))
    decoder.step()
    decoder.step()
    assert beside.tokens and first.weighed is None
    first.cancel()  # the sample of the same prompt grows the tree anew
    decoder.run()
    assert first.weighed is None and sample.weighed is not None and alone.weighed is not None
    assert sample.weighed.nodes >= alone.weighed.nodes // 2
    assert not decoder.active and sample.finish_reason == "stop"


def test_a_request_that_cannot_be_weighted_leaves_the_others_alone() -> None:
    context = tiny_context(4, 1)
    decoder = Decoder(context.target)
    few = ConstraintWeighting("fvo-exact", max_nodes=2)
    bad, good = (
        decoder.submit(Request(PROMPT, build("none", context), params, max_new_tokens=5, stop_ids=frozenset({3})))
        for params in (replace(SAMPLED, constraint=SHORT, constraint_weighting=few), SamplingParams())
    )
    decoder.run()
    assert bad.finish_reason == "error" and good.error is None and good.finish_reason in ("stop", "length")
    assert not decoder.active


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fov", "no constraint_weighting 'fov'; did you mean 'fvo'"),
        ("fvo(nodes=3)", "write KEY=VALUE for a KEY of max_nodes"),
        ("fvo(max_nodes=x)", "'x' is not a number"),
        ("fvo(max_nodes=0)", "max_nodes: must be a whole number"),
        ("fvo(tolerance=2)", "tolerance: must be a number from 0 to 1"),
        (3, "must be one of masked, fvo"),
    ],
)
def test_weightings_that_do_not_exist_are_refused(given: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words.replace("(", r"\(")):
        SamplingParams(constraint_weighting=given)


def test_weightings_are_read_from_texts() -> None:
    read = ConstraintWeighting.read("FVO_exact(max_nodes=9, tolerance=0.1)")
    assert read == ConstraintWeighting("fvo-exact", max_nodes=9, tolerance=0.1)
    assert ConstraintWeighting.read(str(read)) == read
    assert str(ConstraintWeighting()) == "masked"


def test_a_weighting_without_a_grammar_is_refused() -> None:
    with pytest.raises(BadInput, match="weights what a grammar allows, and there is none"):
        decoded(SamplingParams(constraint_weighting="fvo"))


def test_weights_of_tokens() -> None:
    row = torch.tensor([1.0, 2.0, -math.inf, 0.5])
    TokenWeights.of({0: math.log(0.5), 2: 0.0}, math.log(0.25)).apply(row, 2.0)
    expected = [1.0 + 2 * math.log(0.5), 2.0 + 2 * math.log(0.25), -math.inf, 0.5 + 2 * math.log(0.25)]
    assert row.tolist() == pytest.approx(expected)

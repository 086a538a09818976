"""n, best_of, num_beams and num_return_sequences, in Python."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cli_support import toy
from outpace.core import machine
from outpace.core.errors import BadInput


def test_beams_come_best_first() -> None:
    model = toy()
    best = model.generate("abc", num_beams=4, max_new_tokens=8)
    every = model.generate("abc", n=4, num_beams=4, max_new_tokens=8)
    assert [one.score for one in every] == sorted((one.score or 0.0 for one in every), reverse=True)
    assert every[0].tokens == best.tokens
    assert len({tuple(one.tokens) for one in every}) == 4
    assert [one.text for one in best.population] == [one.text for one in every]
    other: Any = {"num_return_sequences": 2}
    assert [one.text for one in model.generate("abc", num_beams=4, max_new_tokens=8, **other)] == [
        one.text for one in every[:2]
    ]


def test_beams_of_a_batch_and_of_asyncio() -> None:
    model = toy()
    both = model.generate(["abc", "xyz"], n=2, num_beams=2, max_new_tokens=6)
    assert [len(group) for group in both] == [2, 2]
    assert both[1][0].text == model.generate("xyz", num_beams=2, max_new_tokens=6).text
    assert asyncio.run(model.agenerate("abc", num_beams=2, max_new_tokens=6)).text == both[0][0].text


def test_sampled_beams_have_a_seed() -> None:
    model = toy()
    one = model.generate("abc", num_beams=3, temperature=1.0, max_new_tokens=8, seed=4)
    assert one.seed == 4
    assert model.generate("abc", num_beams=3, temperature=1.0, max_new_tokens=8, seed=4).tokens == one.tokens
    assert model.generate("abc", num_beams=3, temperature=1.0, max_new_tokens=8, seed=5).tokens != one.tokens


def test_best_of_keeps_the_likeliest_samples() -> None:
    model = toy()
    about: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_new_tokens": 8, "method": "none"}
    every = model.generate("abc", n=5, logprobs=True, **about)

    def mean(one: Any) -> float:
        return float(sum(each.logprob for each in one.logprobs) / max(1, len(one.logprobs)))

    ranked = sorted(every, key=mean, reverse=True)
    best = model.generate("abc", best_of=5, **about)
    assert best.tokens == ranked[0].tokens
    assert best.logprobs == []
    two = model.generate("abc", best_of=5, n=2, **about)
    assert [one.tokens for one in two] == [one.tokens for one in ranked[:2]]
    assert model.generate(["abc", "x"], best_of=5, **about)[0].tokens == best.tokens


def test_speculative_beams_are_the_same_beams() -> None:
    model = toy()
    plain = model.generate("abc", num_beams=3, max_new_tokens=12)
    drafted = model.generate(
        "abc", num_beams=3, max_new_tokens=12, method="dsbd", draft_model=toy("draft"), settings={"max_width": 8}
    )
    assert [one.tokens for one in drafted.population] == [one.tokens for one in plain.population]
    assert drafted.metrics["acceptance_rate"] > 0
    assert drafted.metrics["lossy"] == "answers are those of beam search"


def test_particles_are_a_population() -> None:
    model = toy()
    one = model.generate(
        "abc",
        method="smcsd",
        draft_model=toy("draft"),
        settings={"num_particles": 5},
        temperature=1.0,
        max_new_tokens=10,
        seed=3,
    )
    assert len(one.population) == 5
    assert one.text == one.population[0].text
    two = model.generate(
        "abc", n=2, method="smcsd", draft_model=toy("draft"), temperature=1.0, max_new_tokens=10, seed=3
    )
    assert [each.seed for each in two] == [3, 4]


def test_a_method_of_beams_decodes_as_many_as_are_asked_for() -> None:
    drafted: dict[str, Any] = {"method": "dsbd", "draft_model": toy("draft"), "max_new_tokens": 6}
    model = toy()
    assert len(model.generate("abc", num_beams=1, **drafted).population) == 1
    every = model.generate("abc", **drafted).population
    assert len(every) == 4
    # Without num_beams its own beams are those that n is of: one group, not one for each answer.
    assert [one.tokens for one in model.generate("abc", n=3, **drafted)] == [one.tokens for one in every[:3]]
    sampled = model.generate("abc", n=2, temperature=1.0, seed=4, **drafted)
    assert {one.seed for one in sampled} == {4}
    with pytest.raises(BadInput, match="n=5 answers of num_beams=4"):
        model.generate("abc", n=5, **drafted)
    with pytest.raises(BadInput, match="best_of chooses among samples, and method 'dsbd' decodes beams"):
        model.generate("abc", best_of=3, temperature=1.0, **drafted)


def test_one_beam_is_one_sequence_for_other_methods() -> None:
    model = toy()
    assert model.generate("abc", num_beams=1, max_new_tokens=6).population == []
    assert "".join(model.stream("abc", num_beams=1, max_new_tokens=6)) == model.generate("abc", max_new_tokens=6).text
    particles: dict[str, Any] = {"method": "smcsd", "draft_model": toy("draft"), "temperature": 1.0, "seed": 3}
    assert len(model.generate("abc", num_beams=1, max_new_tokens=6, n=2, **particles)) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 3}, "num_beams asks for beams, and 'smcsd' decodes particles"),
        ({"num_beams": 3, "n": 3}, "num_beams asks for beams, and 'smcsd' decodes particles"),
        ({"best_of": 3}, "best_of chooses among samples, and method 'smcsd' decodes particles"),
        ({"rule": "typical"}, "method 'smcsd' decides about a group of sequences by its own rule; leave out rule"),
        ({"rule": "rejection"}, "method 'smcsd' decides about a group of sequences by its own rule; leave out rule"),
    ],
)
def test_what_particles_cannot_honour_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        toy().generate("abc", method="smcsd", draft_model=toy("draft"), temperature=1.0, max_new_tokens=4, **options)


@pytest.mark.parametrize("method", ["smcsd", "dsbd"])
def test_the_draft_model_s_k_v_counts_before_anything_runs(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = toy(), toy("draft")
    monkeypatch.setattr(machine, "free_memory", lambda: 2**20)
    about: dict[str, Any] = {"method": method, "draft_model": draft, "temperature": 1.0, "max_new_tokens": 4}
    model.generate("abc", **about)
    draft.target.kv_bytes_per_token = 2**30
    with pytest.raises(BadInput, match=r"of \d+ tokens need [\d,]+ MiB of K/V and logits, and 1 MiB are free"):
        model.generate("abc", **about)


def test_a_rule_for_beams_without_a_draft_is_refused() -> None:
    with pytest.raises(BadInput, match="rule 'typical' judges draft tokens, and beams without a draft have none"):
        toy().generate("abc", num_beams=2, max_new_tokens=4, rule="typical")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2, "n": 3}, "n=3 answers of num_beams=2"),
        ({"num_beams": 2, "best_of": 3}, "best_of chooses among samples"),
        ({"best_of": 3}, "best_of=3 at temperature 0"),
        ({"best_of": 2, "n": 3, "temperature": 1.0}, "best_of=2 is less than n=3"),
        ({"num_beams": 2, "grammar": ["a", "b"]}, "a grammar holds one answer"),
        ({"num_beams": 2, "logprobs": True}, "log-probabilities of tokens"),
        ({"num_beams": 2, "method": "pld"}, "'pld' drafts for one sequence"),
        ({"length_penalty": 2.0}, "length_penalty belongs to beam search"),
        ({"num_beams": "3"}, "num_beams must be a whole number"),
        ({"num_beams": 3, "num_beam_groups": 3}, "diverse beam search"),
    ],
)
def test_what_contradicts_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        toy().generate("abc", max_new_tokens=4, **options)


def test_streams_of_beams_are_refused_in_words() -> None:
    with pytest.raises(BadInput, match="which of the beams is the answer is known at the end"):
        toy().stream("abc", num_beams=2)
    with pytest.raises(BadInput, match="best_of chooses among whole answers"):
        toy().stream("abc", best_of=2, temperature=1.0)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"best_of": 2, "temperature": 1.0}])
def test_a_conversation_of_several_answers_does_not_begin(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"a conversation continues one answer: leave out {next(iter(options))}"):
        toy().chat(max_new_tokens=4, **options)


@pytest.mark.parametrize("method", ["smcsd", "dsbd"])
def test_a_conversation_with_a_method_of_several_answers_does_not_begin(method: str) -> None:
    with pytest.raises(BadInput, match=f"a conversation continues one answer, and method '{method}' decodes several"):
        toy().chat(method=method, draft_model=toy("draft"), temperature=1.0, max_new_tokens=4)

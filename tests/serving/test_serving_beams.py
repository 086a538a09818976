"""num_beams, n and best_of over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from cli_support import toy
from outpace.model import Model
from outpace.serving.offered import Defaults
from outpace.serving.service import Service
from outpace.serving.tenants import Tenant
from outpace.targets.table import TableTarget
from serving_support import COMPLETE, chat, client, complete, refused, service


def test_choices_are_the_best_beams() -> None:
    model: Model = toy()
    with client(service(model)) as to:
        answer = complete(to, num_beams=3, n=2)
        one = complete(to, num_beams=3)
        talk = chat(to, num_beams=3, n=3)
    expected = toy().generate("ab", raw=True, num_beams=3, n=2, max_new_tokens=12)
    assert [choice["text"] for choice in answer["choices"]] == [each.text for each in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert one["choices"][0]["text"] == expected[0].text
    assert answer["usage"]["completion_tokens"] == sum(len(each.tokens) for each in expected)
    assert answer["usage"]["speculation"]["method"] == "none"
    assert len({choice["message"]["content"] for choice in talk["choices"]}) == 3


def test_the_number_of_choices_has_a_second_name() -> None:
    with client() as to:
        beams = complete(to, num_beams=3, num_return_sequences=2)
        same = complete(to, num_beams=3, n=2)
        samples = chat(to, temperature=0.9, seed=3, num_return_sequences=3, n=3)
        told = refused(to, 400, "two names of one number", n=1, num_return_sequences=2)
        refused(to, 400, "num_return_sequences", num_return_sequences=0)
    assert beams["choices"] == same["choices"] and len(beams["choices"]) == 2
    assert len(samples["choices"]) == 3
    assert told["param"] == "num_return_sequences"


def test_beams_of_several_prompts_and_with_penalties() -> None:
    with client() as to:
        about = {"num_beams": 2, "n": 2, "length_penalty": 2.0, "early_stopping": "never", "echo": True}
        both = complete(to, prompt=["ab", "cd"], **about)
    assert [choice["text"][:2] for choice in both["choices"]] == ["ab", "ab", "cd", "cd"]


def test_a_prompt_that_has_fewer_beams_keeps_the_numbers_of_its_choices() -> None:
    with client() as to:
        both = complete(to, prompt=["ab", "cd"], num_beams=2, n=2, temperature=1.0, seed=1, top_k=1, echo=True)
    assert [(choice["index"], choice["text"][:2]) for choice in both["choices"]] == [(0, "ab"), (2, "cd")]


def test_all_beams_that_are_answered_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    monkeypatch.setattr(Tenant, "charge", lambda _, tokens: charged.append(tokens))
    with client() as to:
        answer = complete(to, num_beams=3, n=3)
    assert charged == [answer["usage"]["completion_tokens"]]
    assert charged[0] == sum(len(choice["text"]) for choice in answer["choices"]) > 12


def test_what_beams_cannot_do_is_refused_by_name() -> None:
    with client() as to:
        assert refused(to, 400, "known at the end", num_beams=2, stream=True)["param"] == "num_beams"
        assert refused(to, 400, "at most num_beams", num_beams=2, n=3)["param"] == "n"
        assert refused(to, 400, "among beams", path=COMPLETE, num_beams=2, best_of=3)["param"] == "best_of"
        refused(to, 400, "log-probabilities of tokens", num_beams=2, logprobs=True)
        refused(to, 400, "a grammar holds one answer", num_beams=2, guided_choice=["ab", "cd"])
        refused(to, 400, "length_penalty belongs to beam search", length_penalty=2.0)
        refused(to, 400, "drafts for one sequence", num_beams=2, speculation={"method": "pld"})
        for wish in ({"rule": "typical"}, {"rule": "nonsense"}, {"params": {"max_nodes": 3}}):
            refused(to, 400, "beams draft nothing where no method is named", num_beams=2, speculation=wish)


def drafting(method: str) -> Service:
    """A server with a draft model, whose own method decodes groups."""
    return service(defaults=Defaults(method=method, named={"draft_model": toy("draft")}))


def test_choices_of_a_server_that_decodes_beams_are_of_one_group() -> None:
    with client(drafting("dsbd")) as to:
        both, every = complete(to, n=2), complete(to, num_beams=4, n=4)
        one = complete(to, num_beams=1)
        refused(to, 400, "at most num_beams, 4", n=5)
        refused(to, 400, "'speculation' cannot be streamed", stream=True)
        error = refused(to, 400, "'best_of' chooses among samples", path=COMPLETE, best_of=3)
    assert [choice["text"] for choice in both["choices"]] == [each["text"] for each in every["choices"][:2]]
    assert both["choices"][0]["text"] != both["choices"][1]["text"]
    assert both["usage"]["completion_tokens"] == sum(len(choice["text"]) for choice in both["choices"])
    assert one["choices"][0]["text"] == complete_alone()
    assert error["param"] == "best_of"


def complete_alone() -> str:
    """What the model says at temperature 0: one beam."""
    return toy().generate("ab", raw=True, max_new_tokens=12).text


def test_what_particles_cannot_do_is_refused_by_name() -> None:
    with client(drafting("smcsd")) as to:
        assert refused(to, 400, "'smcsd' decodes particles", num_beams=3, n=3)["param"] == "num_beams"
        assert refused(to, 400, "'best_of' chooses among", path=COMPLETE, best_of=3)["param"] == "best_of"
        assert len(complete(to, n=2, temperature=1.0, seed=1)["choices"]) == 2


def test_the_best_of_equal_answers_is_refused() -> None:
    with client() as to:
        error = refused(to, 400, "would decode one answer 3 times", path=COMPLETE, best_of=3, temperature=0)
    assert error["param"] == "best_of"


def test_the_server_s_rule_is_not_one_of_groups() -> None:
    about = Defaults(method="pld", rule="recursive-rejection", named={"draft_model": toy("draft")})
    with client(service(defaults=about)) as to:
        wish = {"method": "smcsd"}
        answer = complete(to, temperature=1.0, seed=1, speculation=wish)
        refused(to, 400, "by its own rule", temperature=1.0, speculation=wish | {"rule": "typical"})
    assert answer["usage"]["speculation"]["method"] == "smcsd"


def test_choices_of_one_prompt_share_its_k_v(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counted(self: TableTarget, sequences: Any, *about: Any, **more: Any) -> None:
        before = sum(len(one.kv) for one in sequences)
        honest(self, sequences, *about, **more)
        rows.append(sum(len(one.kv) for one in sequences) - before)

    honest = TableTarget.prefill
    with client() as to:
        with monkeypatch.context() as patched:
            patched.setattr(TableTarget, "prefill", counted)
            one = complete(to, prompt="ab" * 20, n=3, temperature=1.0, seed=5)
        assert sum(rows) == 2 * 20 - 1
        one = complete(to, n=3, temperature=1.0, seed=5)
        alone = [complete(to, temperature=1.0, seed=seed) for seed in (5, 6, 7)]
    assert [choice["text"] for choice in one["choices"]] == [each["choices"][0]["text"] for each in alone]

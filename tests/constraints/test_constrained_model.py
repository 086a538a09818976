"""The embedded model under schemas and grammars: answers are valid, and the same with every method."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import outpace
from outpace.constraints import Grammar
from outpace.core.errors import BadInput

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
QUERY = """
start: "SELECT " columns " FROM " NAME where? ";"
columns: "*" | NAME (", " NAME)~0..2
where: " WHERE " NAME " = " /[0-9]{1,3}/
NAME: /[a-z]{1,10}/
"""
GRAMMARS: dict[str, Any] = {
    "schema": PERSON,
    "list": {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3},
    "regex": Grammar.regex(r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d"),
    "choice": ["yes", "no", "maybe"],
    "lark": QUERY,
}


@pytest.fixture(scope="module")
def model() -> outpace.Model:
    return outpace.load("smollm2")


def valid(name: str, text: str) -> bool:
    if name in ("schema", "list"):
        found = json.loads(text)
        people = found if name == "list" else [found]
        return all(
            set(one) == {"name", "age", "tags"} and 0 <= one["age"] <= 120 and set(one["tags"]) <= {"red", "green"}
            for one in people
        )
    return {
        "regex": lambda: re.fullmatch(r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d", text) is not None,
        "choice": lambda: text in GRAMMARS["choice"],
        "lark": lambda: (
            re.fullmatch(r"SELECT (\*|[a-z]+(, [a-z]+){0,2}) FROM [a-z]+( WHERE [a-z]+ = \d{1,3})?;", text) is not None
        ),
    }[name]()


@pytest.mark.parametrize("name", GRAMMARS)
def test_greedy_answers_are_valid_and_equal_masked_autoregressive_decoding(model: outpace.Model, name: str) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 120, "grammar": GRAMMARS[name]}
    prompt = "Tell me about a person, a date, a table, or say yes or no."
    plain = model.generate(prompt, method="none", **asked)
    assert plain.finish_reason == "stop"
    assert valid(name, plain.text), plain.text
    for method in ("grammar", "auto", "sam", "recycling"):
        assert model.generate(prompt, method=method, **asked).tokens == plain.tokens


@pytest.mark.parametrize("name", GRAMMARS)
def test_sampled_answers_are_valid_in_a_batch(model: outpace.Model, name: str) -> None:
    found = model.generate("Say something.", n=4, temperature=1.2, top_p=0.95, seed=5, grammar=GRAMMARS[name])
    assert [one.text for one in found if one.finish_reason != "length" and not valid(name, one.text)] == []
    assert any(one.finish_reason == "stop" for one in found)


def test_the_grammar_is_drafted(model: outpace.Model) -> None:
    found = model.generate("Invent three people.", method="grammar", grammar=GRAMMARS["list"], max_new_tokens=120)
    assert found.metrics["mean_acceptance_length"] > 1.4


def test_auto_tells_what_the_grammar_drafted(model: outpace.Model) -> None:
    held = model.generate("Invent three people.", grammar=GRAMMARS["list"], max_new_tokens=80).metrics["drafting_parts"]
    assert held["grammar"] > 0.3
    assert all(0.0 <= share <= 1.0 for share in held.values())
    assert "grammar" not in model.generate("Invent three people.", max_new_tokens=20).metrics["drafting_parts"]


def test_a_stop_string_that_is_forced_is_refused(model: outpace.Model) -> None:
    with pytest.raises(BadInput, match="stop string 'name'"):
        model.generate("x", grammar=PERSON, stop="name")

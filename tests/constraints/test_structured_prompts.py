"""The embedded prompts with grammars: every grammar compiles, and answers under them are valid."""

from __future__ import annotations

import json
from typing import Any

import pytest

import outpace
from outpace.constraints import compiled
from outpace.prompts.questions import load_prompts, stratified

pytestmark = pytest.mark.model

PROMPTS = load_prompts("structured")
KINDS = ("extraction", "function", "sql", "list", "edit")


@pytest.fixture(scope="module")
def model() -> outpace.Model:
    return outpace.load("smollm2")


def kind(prompt: Any) -> str:
    return str(prompt.id.split("-")[1])


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda one: one.id)
def test_every_grammar_compiles_and_refuses_what_it_does_not_describe(model: outpace.Model, prompt: Any) -> None:
    constraint = compiled(prompt.grammar, model.tokenizer)
    for wrong in ("", "no", "{}", "[]", '{"unknown": 1}', "SELECT", "DROP TABLE books;"):
        assert not constraint.accepts(wrong)
    if kind(prompt) == "sql":
        table = prompt.text.split("the table ")[1].split("(")[0]
        column = prompt.text.split("(")[1].split(",")[0].split(")")[0]
        assert constraint.accepts(f"SELECT {column} FROM {table} WHERE {column} = 5 OR {column} < 'a b' LIMIT 3;")
        assert not constraint.accepts("SELECT password FROM users;")
    else:
        assert prompt.grammar.kind == "schema"


def instance(schema: Any) -> Any:
    """The smallest value that a schema of this set describes."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("format") == "date":
        return "2024-02-29"
    if "pattern" in schema:
        return "06:30"
    match schema["type"]:
        case "object":
            return {key: instance(one) for key, one in schema["properties"].items()}
        case "array":
            return [instance(schema["items"])] * schema["minItems"]
        case "integer":
            return schema["minimum"]
        case "boolean":
            return True
    return "word"


@pytest.mark.parametrize("prompt", [one for one in PROMPTS if kind(one) != "sql"], ids=lambda one: one.id)
def test_every_schema_is_satisfiable_and_bounded(model: outpace.Model, prompt: Any) -> None:
    schema = json.loads(prompt.grammar.source)
    constraint = compiled(prompt.grammar, model.tokenizer)
    value = instance(schema)
    assert constraint.accepts(json.dumps(value))
    if isinstance(value, dict):
        first = next(iter(value))
        assert not constraint.accepts(json.dumps({**value, "more": 1}))
        assert not constraint.accepts(json.dumps({key: one for key, one in value.items() if key != first}))
    else:
        assert not constraint.accepts(json.dumps(value * 50))


def judged(prompt: Any, text: str) -> None:
    """Fails for an answer that its schema does not describe, in the eyes of others than the grammar engine."""
    if kind(prompt) == "sql":
        return
    value = json.loads(text, object_pairs_hook=once)
    try:
        import jsonschema  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(json.loads(prompt.grammar.source), format_checker=checker).validate(value)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key is written twice"
    return dict(pairs)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("first", "end"), [(0, 2), pytest.param(2, None, marks=pytest.mark.slow)], ids=["two of each", "the others"]
)
def test_finished_answers_are_valid_and_equal_masked_autoregressive_decoding(
    model: outpace.Model, name: str, first: int, end: int | None
) -> None:
    for prompt in [one for one in PROMPTS if kind(one) == name][first:end]:
        assert prompt.grammar is not None
        asked: dict[str, Any] = {"grammar": prompt.grammar, "max_new_tokens": 96 if end else 160}
        plain = model.generate(prompt.messages, method="none", **asked)
        assert plain.finish_reason in ("stop", "length")
        whole = compiled(prompt.grammar, model.tokenizer).accepts(plain.text)
        # An answer may be whole at the very limit, before its end is drawn.
        assert whole == (plain.finish_reason == "stop") or (whole and len(plain.tokens) == asked["max_new_tokens"])
        if whole:
            judged(prompt, plain.text)
        assert model.generate(prompt.messages, method="auto", **asked).tokens == plain.tokens
        cut = model.generate(prompt.messages, method="auto", **{**asked, "max_new_tokens": 3})
        assert cut.finish_reason == "length" and cut.tokens == plain.tokens[:3]


def test_a_small_limit_has_all_kinds() -> None:
    assert {kind(one) for one in stratified(PROMPTS, 5)} == set(KINDS)

"""Grammars: what compiles, what each allows, where an answer may end, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pydantic
import pytest

from outpace.certify.letters import Letters
from outpace.constraints import Grammar, GrammarLimits, compiled, compiler
from outpace.core.constraint import bits_of, count, holds, single, tokens_of
from outpace.core.errors import BadInput
from outpace.models.base import ChatTokenizer

BYTES = Letters([*(chr(value) for value in range(32, 127)), '{"', '": ', "true", "ab", None])
STOP = len(BYTES.pieces) - 1
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}


def accepted(grammar: Grammar, text: str, tokenizer: ChatTokenizer = BYTES) -> bool:
    """Walk the text's tokens, and check that masks and steps agree on the way."""
    state = compiled(grammar, tokenizer).begin()
    for token in tokenizer.encode(text):
        after = state.advance(token)
        assert (after is not None) == holds(state.allowed(len(tokenizer)), token)
        if after is None:
            return False
        state = after
    assert not holds(state.allowed(len(tokenizer)), STOP)  # the sampler allows it, where the grammar is complete
    assert state.complete == compiled(grammar, tokenizer).accepts(text)
    return state.complete


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (Grammar.choice(["red", "green", 'a "b"']), ["red", 'a "b"'], ["re", "redd", "blue", ""]),
        (Grammar.regex(r"^\d{2}-[ab]+$"), ["12-a", "99-ab"], ["1-a", "12-", "12-c"]),
        (Grammar.regex(r"a/b\$"), ["a/b$"], ["a/b"]),
        (Grammar.lark('start: "(" start ")" | "x"'), ["x", "((x))"], ["(x", "()", "xx"]),
        (Grammar.lark('root ::= "a" b\nb ::= "b"*'), ["a", "abb"], ["b", "aba"]),
        (Grammar.schema(PERSON), ['{"name": "Al", "age": 7}'], ['{"name": "Alan", "age": 7}', '{"age": 7}']),
        (Grammar.schema(json.dumps(PERSON)), ['{"name": "", "age": 0}'], ['{"name": "", "age": -1}', '{ "name"']),
        (Grammar.schema(True), ["1", '[{"a": null}]'], ["[1", "nul"]),
    ],
)
def test_a_grammar_accepts_what_it_describes_alone(grammar: Grammar, yes: Seq[str], no: Seq[str]) -> None:
    assert [text for text in yes if not accepted(grammar, text)] == []
    assert [text for text in no if accepted(grammar, text)] == []


def test_there_may_be_many_choices_and_all_characters_in_them() -> None:
    many = compiled(Grammar.choice([f"value-{at}" for at in range(20_000)]), BYTES)
    state = many.begin()
    assert BYTES.decode(state.forced()) == "value-"
    assert [one for one in ("value-7", "value-19999", "value-20000", "value-") if many.accepts(one)] == [
        "value-7",
        "value-19999",
    ]
    nested = Grammar.choice(["red", "red wine", "red wine vinegar", "rice"])
    assert [one for one in ("re", "red", "red w", "red wine", "red wine vinegar", "rice") if accepted(nested, one)] == [
        "red",
        "red wine",
        "red wine vinegar",
        "rice",
    ]
    characters = [chr(at) for at in range(128)]
    either = compiled(Grammar.choice([f"b{one}" for one in characters]), Letters([*characters, None]))
    assert [one for one in characters if not either.accepts(f"b{one}")] == []


def test_an_object_may_have_many_optional_keys() -> None:
    many = Grammar.schema({**_long(1_000), "additionalProperties": False})
    assert accepted(many, '{"p5": "x", "p999": ""}') and not accepted(many, '{"p1000": ""}')


def test_a_class_of_pydantic_is_a_schema() -> None:
    class Point(pydantic.BaseModel):
        x: int
        y: int

    grammar = Grammar.read(Point)
    assert grammar == Grammar.schema(Point.model_json_schema())
    assert accepted(grammar, '{"x": 1, "y": -2}') and not accepted(grammar, '{"x": 1}')


def test_white_space_is_fixed_unless_the_schema_says_otherwise() -> None:
    assert not accepted(Grammar.schema(PERSON), '{"name":"Al","age":7}')
    flexible = Grammar.schema({**PERSON, "x-guidance": {"whitespace_flexible": True}})
    for text in ('{ "name": "Al", "age": 7}', '{"name":"Al","age":7}', '{"name" :"Al" ,   "age":  7 }'):
        assert accepted(flexible, text)


def test_white_space_and_separators_are_the_schemas_to_choose() -> None:
    narrow = {"item_separator": ",", "key_separator": " ?: ?"}
    assert accepted(Grammar.schema({**PERSON, "x-guidance": narrow}), '{"name" : "Al","age":7}')
    some = Grammar.schema({**PERSON, "x-guidance": {"whitespace_pattern": "[ \\n]{0,2}"}})
    assert accepted(some, '{ "name":   "Al", "age": 7  }') and not accepted(some, '{   "name": "Al", "age": 7}')


AGE: dict[str, Any] = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
EITHER = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}
MADE_OF_A: dict[str, Any] = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (AGE, '{"age": 3, "b": "x"}', r'{"age": 3, "\u0061ge": "x"}'),
        (MADE_OF_A, '{"ab": 1, "b": "x"}', r'{"\u0061b": "x"}'),
        ({"type": "array", "items": AGE}, '[{"age": 3, "b": "x"}]', r'[{"age": 3, "\u0061ge": "x"}]'),
        ({"type": "object"}, r'{"a\n": 1}', r'{"\u0061": 1}'),
        ({**AGE, "properties": {"a/e": {"type": "integer"}}, "required": []}, '{"a/e": 3}', r'{"a\/e": "x"}'),
    ],
)
def test_a_key_has_one_spelling(schema: Any, yes: str, no: str) -> None:
    # Escaped, a key would be one that the schema does not name, of any value.
    json.loads(no)
    for one in (schema, {**schema, "x-guidance": {"whitespace_flexible": True}}):
        assert accepted(Grammar.schema(one), yes)
        assert not accepted(Grammar.schema(one), no)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["b", "a\u0001"]},
        {"const": "a\x7f"},
        {"items": {"const": {"k": ["a\x1fb"]}}},
        {"properties": {"enum": {"enum": ["\x00"]}}},
        {"type": "string", "pattern": r"^a\u0001$"},
        {"type": "string", "pattern": "^a\x01$"},
        {"type": "string", "pattern": r"^a[\x01-\x01]$"},
        {"type": "string", "pattern": r"^a[\x00-\x01--\x00]$"},
        {"type": "string", "pattern": r"^(a\x{1F}|b)$"},
        {"type": "string", "pattern": r"^a\v$"},
        {"patternProperties": {r"^a\x7f$": {}}},
    ],
)
def test_a_schema_that_demands_a_control_character_is_refused(schema: Any) -> None:
    """The engine would leave it out of the text, and take "a" for "a\\u0001"."""
    with pytest.raises(BadInput, match=r"demands the control character U\+00[017][01BF].*; take it out"):
        compiled(Grammar.schema(schema), BYTES)


def test_control_characters_that_are_not_demanded_are_left_out() -> None:
    for pattern in (r"^a[\x00-\x1f]?$", r"^a[^\x01]?$", r"^a[b\u0001]?$", r"^\[?a\x20?$", r"^a[\s\v]?$"):
        constraint = compiled(Grammar.schema({"type": "string", "pattern": pattern}), BYTES)
        assert constraint.accepts('"a"') and not constraint.accepts(r'"a\u0001"')
    texts = {"const": 'a\n\t\r\b\f/\\"'}
    assert accepted(Grammar.schema(texts), json.dumps(texts["const"]))
    key = {"type": "object", "properties": {"a\u0001": {"type": "integer"}}, "required": ["a\u0001"]}
    assert accepted(Grammar.schema(key), r'{"a\u0001": 1, "b": 2}')
    assert not accepted(Grammar.schema(key), r'{"a\u0001": 1, "a\u0001": "x"}')
    assert accepted(Grammar.schema({"default": "\x01", "type": "integer"}), "1")


@pytest.mark.parametrize(
    ("schema", "yes"),
    [
        ({"type": "object", "minProperties": 1}, '{"a": 1}'),
        ({**AGE, "minProperties": 2}, '{"age": 1, "b": 2}'),
        ({"minProperties": 2, "type": ["object", "null"], "allOf": [AGE]}, '{"age": 1, "b": 2}'),
        ({**AGE, "allOf": [{"minProperties": 2}]}, '{"age": 1, "b": 2}'),
        ({"const": {"a": 1, "b": 2}, "minProperties": 2}, '{"a": 1, "b": 2}'),
        ({"type": "integer", "minProperties": 9}, "1"),
        ({"type": "object", "properties": {"minProperties": {"const": 7}}}, '{"minProperties": 7}'),
        ({**EITHER, "minProperties": 1}, '{"b": 2}'),
    ],
)
def test_keys_are_demanded_where_none_can_be_written_twice(schema: Any, yes: str) -> None:
    assert accepted(Grammar.schema(schema), yes)
    twice = yes.replace('"b"', '"age"')
    assert twice == yes or not accepted(Grammar.schema(schema), twice)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 2},
        {"minProperties": 2},
        {**AGE, "minProperties": 3},
        {"type": "array", "items": {"anyOf": [AGE, {"minProperties": 2}]}},
        {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False, "minProperties": 2},
        {"allOf": [AGE, {"minProperties": 3}]},
    ],
)
def test_keys_that_may_be_written_twice_cannot_be_counted_on(schema: Any) -> None:
    with pytest.raises(BadInput, match=r"minProperties is [23], .* name [12] or more in 'required', or lower"):
        compiled(Grammar.schema(schema), BYTES)


def test_states_are_values_whatever_order_they_are_asked_in() -> None:
    begin = compiled(Grammar.choice(["aab", "aba", "b"]), BYTES).begin()
    [a, b] = [BYTES.encode(one)[0] for one in "ab"]
    first, other = begin.advance(a), begin.advance(b)
    assert first is not None and other is not None
    deep = first.advance(a)
    assert deep is not None
    assert tokens_of(deep.allowed(STOP), STOP).tolist() == [b]
    assert other.complete and not count(other.allowed(STOP))
    assert set(tokens_of(first.allowed(STOP), STOP).tolist()) == {a, b, BYTES.encode("ab")[0]}
    assert set(tokens_of(begin.allowed(STOP), STOP).tolist()) == {a, b, BYTES.encode("ab")[0]}
    assert first.advance(a) is deep


def test_many_requests_share_what_was_compiled() -> None:
    grammar = Grammar.regex("(ab)+")
    one = compiled(grammar, BYTES)
    assert compiled(grammar, BYTES) is one
    states = [one.begin() for _ in range(20)]
    moved = [state.advance(BYTES.encode("a")[0]) for state in states]
    assert all(state is not None and not state.complete for state in moved)
    del states, moved
    assert accepted(grammar, "abab")


def test_a_slow_grammar_delays_no_other_and_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, slow = Grammar.regex("kept"), Grammar.regex("s(low)")
    compiled(kept, BYTES)
    honest, entered, go, tried = compiler._matcher, Event(), Event(), list[Grammar]()

    def matcher(grammar: Grammar, *given: Any) -> Any:
        tried.append(grammar)
        if grammar is slow:
            entered.set()
            assert go.wait(60)
            raise BadInput("too slow")
        return honest(grammar, *given)

    monkeypatch.setattr(compiler, "_matcher", matcher)
    with ThreadPoolExecutor(3) as threads:
        two = [threads.submit(compiled, slow, BYTES) for _ in range(2)]
        assert entered.wait(60)
        for other in (kept, Grammar.regex("an(other)")):
            assert threads.submit(compiled, other, BYTES).result(60).accepts("kept") == (other is kept)
        go.set()
        assert [str(one.exception(60)) for one in two] == ["too slow"] * 2
    assert tried.count(slow) == 1
    monkeypatch.setattr(compiler, "_REFUSED_FOR", 0.0)
    with pytest.raises(BadInput, match="too slow"):
        compiled(slow, BYTES)
    assert tried.count(slow) == 2


def test_forced_text_is_spelled_by_tokens_that_are_allowed() -> None:
    state: Any = compiled(Grammar.schema(PERSON), BYTES).begin()
    forced = state.forced()
    assert BYTES.decode(forced) == '{"name": "'
    for token in forced:
        state = state.advance(token)
        assert state is not None


def test_a_set_of_bits() -> None:
    bits = bits_of([0, 31, 32, 63, 64], 65)
    assert bits.dtype == np.uint32 and len(bits) == 3
    assert tokens_of(bits, 65).tolist() == [0, 31, 32, 63, 64]
    assert count(bits) == 5
    assert holds(bits, 63) and not holds(bits, 62)
    assert single(bits) is None and single(bits_of([], 65)) is None and single(bits_of([3, 5], 65)) is None
    assert [single(bits_of([token], 65)) for token in (0, 31, 32, 64)] == [0, 31, 32, 64]


def _nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def _long(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(depth)}}


SELF = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
REST = {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["next"]}
OWN = {"$id": "http://x/y"}


def required_of(name: str, pattern: str) -> dict[str, Any]:
    return {"type": "object", "required": [name], "patternProperties": {pattern: {}}}


def _ref(place: str) -> dict[str, Any]:
    return {"additionalProperties": {"$ref": f"#{place}"}}


def _guided(**options: Any) -> dict[str, Any]:
    return {**PERSON, "x-guidance": options}


@pytest.mark.parametrize(
    ("make", "limits", "said"),
    [
        (lambda: Grammar.schema({"type": "integer", "minimum": 5, "maximum": 4}), None, "schema cannot be used"),
        (lambda: Grammar.schema(False), None, "schema"),
        (lambda: Grammar.schema({"enum": []}), None, "schema"),
        (lambda: Grammar.schema(SELF), None, "unsatisfiable.*without end"),
        (lambda: Grammar.schema(REST), None, "unsatisfiable.*without end"),
        (lambda: Grammar.schema({**REST, "required": [], "minProperties": 1}), None, "unsatisfiable.*without end"),
        (lambda: Grammar.schema({**SELF, **OWN, "properties": {"next": {"$ref": "http://x/y"}}}), None, "without end"),
        (lambda: Grammar.schema({**SELF, **OWN, "properties": {"next": {"$ref": "y#"}}}), None, "without end"),
        (lambda: Grammar.schema({**REST, "patternProperties": {"^n": {"$ref": "#"}}}), None, "without end"),
        (
            lambda: Grammar.schema({**REST, "patternProperties": {"^n": {"$ref": "#"}}, "additionalProperties": False}),
            None,
            "without end",
        ),
        (lambda: Grammar.schema({"type": 5}), None, "schema cannot be used"),
        (lambda: Grammar.schema({"type": True}), None, "schema cannot be used"),
        (lambda: Grammar.schema({"type": [{}]}), None, "schema cannot be used"),
        (lambda: Grammar.schema({"$ref": "http://[#a"}), None, "schema cannot be used"),
        (lambda: Grammar.schema({"$id": "http://[", "$ref": "#a"}), None, "schema cannot be used"),
        (lambda: Grammar.schema(required_of("a", "a{99999999999}")), None, "schema cannot be used"),
        (lambda: Grammar.schema({"enum": ["\ud800"]}), None, r"schema is not valid text: .*U\+D800"),
        (lambda: Grammar.read({"enum": ["\ud800"]}), None, r"schema is not valid text: .*U\+D800"),
        (lambda: Grammar.schema(r'{"enum": ["\ud800"]}'), None, r"schema is not valid text: .*U\+D800"),
        (lambda: Grammar.schema({"$ref": "#"}), None, "unsatisfiable|cannot be used"),
        (lambda: Grammar.schema({"$ref": "#/$defs/none"}), None, "schema cannot be used"),
        (lambda: Grammar.schema({"$ref": "https://example.com/x.json"}), None, "schema cannot be used"),
        (lambda: Grammar.schema({**REST, **_ref("/anyOf/\u00b2"), "anyOf": [{}]}), None, "schema cannot be used"),
        (lambda: Grammar.schema({**REST, **_ref("/anyOf/" + "9" * 5000), "anyOf": [{}]}), None, "schema cannot be"),
        (lambda: Grammar.schema({"not": {"type": "integer"}}), None, "schema cannot be used.*not"),
        (lambda: Grammar.schema(_guided(lenient=True)), None, "x-guidance.*'lenient', which is not taken"),
        (lambda: Grammar.schema(_guided(coerce_one_of=True)), None, "x-guidance.*'coerce_one_of'"),
        (lambda: Grammar.schema(_guided(json_allowed_escapes="u")), None, "x-guidance.*'json_allowed_escapes'"),
        (lambda: Grammar.schema(_guided(whitespace_flexible=1)), None, "whitespace_flexible' must be true or false"),
        (lambda: Grammar.schema(_guided(item_separator=";")), None, "white space around one comma"),
        (lambda: Grammar.schema(_guided(key_separator=":x?")), None, "white space around one colon"),
        (lambda: Grammar.schema(_guided(whitespace_pattern="[ x]")), None, "must be a pattern of white space"),
        (lambda: Grammar.schema({**PERSON, "x-guidance": 1}), None, "x-guidance.* must be an object"),
        (lambda: Grammar.schema({"items": _guided(whitespace_flexible=True)}), None, "put it at the top"),
        (lambda: Grammar.schema({"type": "array", "uniqueItems": True}), None, "uniqueItems"),
        (lambda: Grammar.schema('{"type": '), None, "not valid JSON"),
        (lambda: Grammar.schema([1]), None, "JSON object"),
        (lambda: Grammar.schema(_long(200)), GrammarLimits(max_bytes=1000), "bytes, and the limit is 1,000"),
        (lambda: Grammar.regex("a("), None, "regular expression cannot be used"),
        (lambda: Grammar.regex("(?=a)b"), None, "regular expression cannot be used"),
        (lambda: Grammar.regex(""), None, "empty"),
        (lambda: Grammar.regex("\u00e9"), None, "no answer at all"),
        (lambda: Grammar.lark("start: x"), None, "grammar cannot be used"),
        (lambda: Grammar.lark("hello"), None, "grammar cannot be used"),
        (lambda: Grammar.read('{"type": "object"}'), None, r"JSON text; give .*Grammar.schema\(text\)"),
        (lambda: Grammar.choice([]), None, "list of texts"),
        (lambda: Grammar.choice(["a", "a"]), None, "same"),
        (lambda: Grammar.choice(["\u00e9"]), None, "no answer at all"),
        (lambda: GrammarLimits(seconds=0.0), None, "seconds"),
        (lambda: GrammarLimits(max_bytes=2**64), None, "must be 1 to 1,099,511,627,776 bytes"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(make: Any, limits: GrammarLimits | None, said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        compiled(make(), BYTES, *([] if limits is None else [limits]))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("grammar", "line"),
    [
        (
            Grammar.schema({"type": "integer", "minimum": 5, "maximum": 4}),
            "the schema cannot be used: Unsatisfiable schema: minimum (5) is greater than maximum (4)",
        ),
        (Grammar.lark('start: "a" b\n\nb: "b\n'), "the grammar cannot be used: line 3, column "),
        (Grammar.lark('root ::= "a" b'), "the grammar cannot be used: Rule 'b' not found"),
        (Grammar.lark("root ::= ("), "the grammar cannot be used: "),
        (Grammar.lark("root ::= " + "(" * 5000), "the grammar cannot be used: it is nested too deeply"),
        (Grammar.schema(_nested(200)), "the schema cannot be used: it is nested too deeply"),
        (Grammar.regex("a("), "the regular expression cannot be used: invalid regex "),
    ],
)
def test_a_refusal_says_where_in_the_users_own_text(grammar: Grammar, line: str) -> None:
    """The engine numbers the lines of a text that has ours before the user's, and shows both."""
    with pytest.raises(BadInput) as refused:
        compiled(grammar, BYTES)
    said = str(refused.value)
    assert said.startswith(line), said
    assert not any(words in said for words in ("llguidance", "no_forcing", "start:", "x-guidance", "<non-verbose/>"))


def test_a_regular_expression_that_explodes_ends_in_words() -> None:
    """Its parts are built as they are needed: the answer ends where the engine's limit is reached."""
    state: Any = compiled(Grammar.regex("(((a{1,300}){1,300}){1,300}){1,300}"), BYTES).begin()
    with pytest.raises(BadInput, match="the grammar is too complex to go on"):
        for _ in range(200):
            state.allowed(len(BYTES))
            state = state.advance(BYTES.encode("a")[0])


def test_recursion_that_may_end_is_taken() -> None:
    tree = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    }
    for other in (
        {**SELF, "properties": {"next": {"type": "null"}}, "additionalProperties": {"$ref": "#"}},
        {**REST, "patternProperties": {"^n": {"type": "null"}}},
        {**REST, "required": [], "minProperties": 1, "patternProperties": {"^n": {"type": "null"}}},
    ):
        assert accepted(Grammar.schema(other), '{"next": null}')
    assert accepted(Grammar.schema(tree), '{"next": {"next": null}}')
    assert not accepted(Grammar.schema(tree), '{"next": {}}')


def test_a_users_pattern_is_not_tried_by_backtracking() -> None:
    """It would take longer than the age of the universe, and no other thread would run."""
    compiled(Grammar.schema(required_of("a" * 60 + "!", "(a+)+$")), BYTES)


def test_references_may_name_anchors() -> None:
    named = {"$ref": "#name", "$defs": {"x": {"$anchor": "name", "type": "integer"}}}
    assert accepted(Grammar.schema(named), "3")
    assert not accepted(Grammar.schema(named), "true")


def test_patterns_of_schemas_know_the_white_space_of_ecma_262() -> None:
    spaces = Letters(['"', "a", " ", "\ufeff", "\x85", "\u2003", "-", None])
    for pattern, fits in (
        (r"^\s$", " \ufeff\u2003"),
        (r"^\S$", "a\x85-"),
        (r"^[\s-]$", " \ufeff\u2003-"),
        (r"^[^\s]$", "a\x85-"),
    ):
        for schema in ({"pattern": pattern}, {"$ref": "#/$defs/enum", "$defs": {"enum": {"pattern": pattern}}}):
            constraint = compiled(Grammar.schema({"type": "string", **schema}), spaces)
            taken = [one for one in "a \ufeff\x85\u2003-" if constraint.accepts(f'"{one}"')]
            assert set(taken) == set(fits), (pattern, schema)
    quoted = Grammar.schema({"const": {"pattern": r"\s"}})
    assert json.loads(quoted.source)["const"] == {"pattern": r"\s"}
    assert compiled(quoted, BYTES).accepts('{"pattern": "\\\\s"}')


LONG_HOST = ".".join(["a" * 50] * 5)


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-02-28", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-02-30"]),
        ("time", ["12:00:59Z", "00:00:00.06+01:00"], ["23:59:60Z", "12:00:60Z"]),
        ("date-time", ["2024-02-29t12:00:59z"], ["2023-02-29T12:00:00Z", "2024-02-29T12:00:60Z"]),
        ("hostname", ["a", "ab-c.d1", "a--b", LONG_HOST[:253]], ["ab--c", "xn--a", "x.ab--c", f"{LONG_HOST}.com"]),
    ],
)
def test_formats_allow_what_their_standards_allow(form: str, yes: Seq[str], no: Seq[str]) -> None:
    text = {"type": "string", "format": form}
    for schema in (text, {**text, "pattern": "."}, {**text, "pattern": ".", "allOf": [{"minLength": 1}]}):
        constraint = compiled(Grammar.schema({"type": "array", "items": schema}), BYTES)
        assert [one for one in yes if not constraint.accepts(f'["{one}"]')] == []
        assert [one for one in no if constraint.accepts(f'["{one}"]')] == []
    either = compiled(Grammar.schema({"format": form}), BYTES)
    assert either.accepts("3") and either.accepts(f'"{yes[0]}"') and not either.accepts(f'"{no[0]}"')
    assert compiled(Grammar.schema({"const": {"format": form}}), BYTES).accepts(f'{{"format": "{form}"}}')
    assert compiled(Grammar.schema({**text, "enum": [yes[0]]}), BYTES).accepts(f'"{yes[0]}"')
    assert compiled(Grammar.schema({"type": "integer", "format": form}), BYTES).accepts("3")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.schema(_long(50)),
        lambda: Grammar.regex("(a|b){3}c*"),
        lambda: Grammar.lark('start: "(" start ")" | "x"'),
        lambda: Grammar.choice(["ab", "ba"]),
    ],
)
def test_compiling_stops_at_the_limit_that_the_user_sets(make: Any) -> None:
    compiled(make(), BYTES)
    with pytest.raises(BadInput, match=r"too complex to compile within 1e-06 s; make it simpler, or raise the limit"):
        compiled(make(), BYTES, GrammarLimits(seconds=1e-6))

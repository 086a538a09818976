"""Answers under a schema or a grammar over HTTP, and strict tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving_support import CHAT, COMPLETE, OTHER_BLANKS, USER, Scripted, chat, client, events, refused, service
from test_serving_tools import asked, calls, model

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PROSE = 'Well, {"city": "Rome"} I think'
"""What the model would say."""


def said(path: str = CHAT, **body: Any) -> tuple[str, str]:
    """The text of an answer and why it ended."""
    prompt = {"messages": USER} if path == CHAT else {"prompt": "ab"}
    found = model("hermes", PROSE)
    if path == COMPLETE:
        found.tokenizer.chat([])
    with client(service(found)) as to:
        asked_for = {"model": "toy", "temperature": 0, "max_tokens": 60, **prompt, **body}
        answer = to.post(path, json=asked_for)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["message"]["content"] if path == CHAT else choice["text"], choice["finish_reason"]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_schema_holds(path: str, body: dict[str, Any]) -> None:
    text, reason = said(path, **body)
    assert json.loads(text)["city"] in ("Oslo", "Bergen")
    assert reason == "stop"


def test_a_schema_holds_in_streams_and_in_each_of_several_answers() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {"messages": USER, "response_format": form, "max_tokens": 60}
    with client(service(model("hermes", PROSE))) as to:
        chunks = [one["choices"][0] for one in events(to, CHAT, **body)]
        assert json.loads("".join(one["delta"].get("content") or "" for one in chunks))["city"] in ("Oslo", "Bergen")
        assert [one["finish_reason"] for one in chunks if one["finish_reason"]] == ["stop"]
        whole = chat(to, **body, n=2, temperature=1, seed=1)["choices"]
        assert len(whole) == 2
        streamed = {0: "", 1: ""}
        for chunk in events(to, CHAT, **body, n=2, temperature=1, seed=1):
            for one in chunk["choices"]:
                streamed[one["index"]] += one["delta"].get("content") or ""
        for one in whole:
            assert json.loads(one["message"]["content"])["city"] in ("Oslo", "Bergen")
            assert streamed[one["index"]] == one["message"]["content"]


def test_other_forms() -> None:
    assert said(guided_choice=["yes", "no"])[0] in ("yes", "no")
    assert said(guided_regex="[0-9]{3}")[0].isdigit()
    assert said(guided_grammar='start: "<" /[a-c]{2}/ ">"')[0][::3] == "<>"
    assert said(response_format={"type": "text"})[0] == PROSE
    text, reason = said(response_format={"type": "json_object"}, max_tokens=5)
    assert text.startswith("{")
    assert reason == "length"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": {"type": "xml"}}, "type must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}}, "did you mean"),
        ({"guided_json": {"not": {}}}, "schema cannot be used"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "contradict each other"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "contradict each other"),
        ({"guided_regex": "("}, "expression cannot be used"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    with client(service(model("hermes", "x"))) as to:
        error = refused(to, 400, words, **body)
    assert error["param"] in body


def test_a_weighting_of_what_a_grammar_allows() -> None:
    asked_for = {"model": "toy", "max_tokens": 9, "messages": USER, "guided_choice": ["yes", "no"], "seed": 1}
    with client(service(model("hermes", PROSE))) as to:
        for given, sampled in (("fvo", "fvo-exact"), ("fvo-one-step", "fvo-one-step"), (None, "masked")):
            answer = to.post(CHAT, json={**asked_for, "constraint_weighting": given})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] in ("yes", "no")
            assert answer.json()["usage"]["speculation"]["constraint_weighting"] == sampled
        refused(to, 400, "no constraint_weighting 'fov'", constraint_weighting="fov", guided_choice=["yes", "no"])
        refused(to, 400, "weights what a grammar allows, and there is none", constraint_weighting="fvo")
        many: dict[str, Any] = {"constraint_weighting": "fvo(max_nodes=1025)", "guided_choice": ["yes", "no"]}
        error = refused(to, 400, "max_nodes is 1,025, and this server scores 1,024 for a request at most", **many)
        wide = {**many, "constraint_weighting": "fvo-one-step(topk=65)"}
        refused(to, 400, "'constraint_weighting': topk is 65, and this server looks at 64 tokens", **wide)
        assert error["param"] == "constraint_weighting"


STRICT = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}}]
WRONG = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_strict_tools_have_arguments_of_their_schema() -> None:
    whole, chunks = asked("hermes", WRONG, tools=STRICT)
    assert whole["message"]["content"].strip() == "Let me see."
    [(name, arguments)] = calls(whole["message"])
    assert name == "weather"
    assert arguments["city"] in ("Oslo", "Bergen")
    assert whole["finish_reason"] == "tool_calls"
    assert chunks


def test_a_token_that_begins_every_text_is_no_part_of_a_calls_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Scripted.encode
    monkeypatch.setattr(Scripted, "encode", lambda self, text: [len(self) - 1, *plain(self, text)])
    monkeypatch.setattr(
        Scripted, "encode_batch", lambda self, texts: [plain(self, text) for text in texts], raising=False
    )
    whole, _ = asked("hermes", WRONG, tools=STRICT)
    [(name, arguments)] = calls(whole["message"])
    assert name == "weather" and arguments["city"] in ("Oslo", "Bergen")


CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize(
    "wrong",
    [
        CALL,
        f" {CALL}",
        f"```json\n{CALL}\n```",
        f"```\n{CALL}\n```",
        CALL.replace(" ", "\n "),
        *(f"{blank}{CALL}" for blank in OTHER_BLANKS),
        f"```json\u00a0{CALL}\n```",
    ],
)
@pytest.mark.parametrize("family", ["hermes", "llama3"])
def test_calls_without_a_mark_are_held_to_their_schemas(family: str, wrong: str) -> None:
    if family == "llama3":
        wrong = wrong.replace("arguments", "parameters")
    whole, _ = asked(family, wrong, tools=STRICT)
    found = [arguments for _, arguments in calls(whole["message"])]
    assert all(one["city"] in ("Oslo", "Bergen") for one in found)
    if wrong[0].isspace() or "\u00a0" in wrong:
        assert not found or wrong[0] == " "
    elif family == "hermes":
        assert len(found) == 1


@pytest.mark.parametrize("said", ["```python\nprint(1)\n```", "[1, 2]", "``` {", "Rome: {1}"])
def test_text_that_is_no_call_is_allowed_beside_strict_tools(said: str) -> None:
    whole, _ = asked("hermes", said, tools=STRICT)
    if said != "``` {":  # a call begins like that
        assert whole["message"]["content"] == said


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_strict_tools_that_have_to_be_called(family: str, choice: Any) -> None:
    whole, _ = asked(family, "no idea", tools=STRICT, tool_choice=choice)
    [(name, arguments)] = calls(whole["message"])
    assert name == "weather"
    assert arguments["city"] in ("Oslo", "Bergen")


def test_text_without_a_call_is_allowed_beside_strict_tools() -> None:
    whole, _ = asked("hermes", "No need for that.", tools=STRICT)
    assert whole["message"]["content"] == "No need for that."
    assert whole["finish_reason"] == "stop"


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"next": {"$ref": "#"}}, "without end"),
        ({"next": {"type": "integer", "minimum": 5, "maximum": 4}}, "Unsatisfiable schema"),
        ({"next": nested(400)}, "nested too deeply"),
        ({"next": {"$ref": "http://[#a"}}, "Invalid URI reference"),
        ({"next": {"type": 5}}, "type must be a string"),
    ],
)
def test_strict_tools_with_bad_schemas_are_refused(parameters: dict[str, Any], words: str) -> None:
    schema = {"type": "object", "properties": parameters, "required": ["next"]}
    tools = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": schema}}]
    with client(service(model("hermes", "x"))) as to:
        for choice in ("auto", "required"):
            error = refused(to, 400, words, tools=tools, tool_choice=choice)
            assert error["param"] == "tools"


def test_half_a_surrogate_pair_in_a_schema_is_refused() -> None:
    schema = {"type": "object", "properties": {"next": {"enum": ["\ud800"]}}}
    tools = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": schema}}]
    with client(service(model("hermes", "x"))) as to:
        for form in ({"guided_json": schema}, {"tools": tools}):
            body = json.dumps({"model": "toy", "messages": USER, **form})
            answer = to.post(CHAT, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400 and "half of a surrogate pair" in answer.json()["error"]["message"]


def test_strict_tools_and_a_schema_contradict_each_other() -> None:
    with client(service(model("hermes", "x"))) as to:
        refused(to, 400, "contradict each other", tools=STRICT, guided_json=SCHEMA)


SELF = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
EXPLODING = "(((a{1,300}){1,300}){1,300}){1,300}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}}, "schema cannot be used"),
        ({"guided_json": SELF}, "schema is unsatisfiable"),
        ({"guided_json": nested(400)}, "nested too deeply"),
        ({"guided_json": {"description": "x" * 2_000_000}}, "and the limit is 1,000,000"),
        ({"guided_regex": "\u00e9"}, "no answer at all"),
        ({"guided_regex": EXPLODING, "max_tokens": 300, "ignore_eos": True}, "too complex to go on"),
        ({"guided_regex": "a\u00e9"}, "none of the vocabulary's tokens goes on"),
        ({"guided_choice": ["abc"], "stop": "b"}, "the stop string 'b' is in the text that the grammar demands"),
        ({"guided_choice": ["ba", "bb"], "stop": ["a", "bb"]}, "cut the answer before it was complete"),
    ],
)
def test_bad_grammars_end_in_one_line(body: dict[str, Any], words: str) -> None:
    with client(service(model("hermes", "x"))) as to:
        error = refused(to, 400, words, temperature=0, **body)
        assert "\n" not in error["message"]
        assert chat(to, guided_choice=["yes"])["choices"][0]["message"]["content"] == "yes", "the server goes on"

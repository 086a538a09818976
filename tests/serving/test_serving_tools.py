"""Tool calls: how each family of chat templates writes them, whole and in a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from outpace.model import Model
from outpace.models.chat_template import render
from outpace.serving import tool_grammar
from outpace.serving.tools import HERMES, LLAMA3, MISTRAL as MISTRAL_LIST, MISTRAL_BARE, format_of
from outpace.targets.table import TableTarget
from serving_support import Scripted, client, events, refused, service

NAMES = frozenset({"weather", "time"})
TEMPLATES = {
    "hermes": """{% if tools %}<tool_call>{"name": "", "arguments": {}}{% endif %}""",
    "mistral": "{% if tools %}[TOOL_CALLS]{% endif %}",
    "bare": "{% if tools %}[TOOL_CALLS]name[ARGS]{% endif %}",
    "llama3": """<|start_header_id|>{% if tools %}{"parameters": {}}{% endif %}""",
}
MARKER = "[TOOL_CALLS]"
TOOLS = [{"type": "function", "function": {"name": one, "parameters": {"type": "object"}}} for one in sorted(NAMES)]
ASKED: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
ONE = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SECOND = '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'
MISTRAL = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}]'


def model(family: str, answer: str) -> Model:
    """A model that answers with this text whatever it is asked; "\\x00" in it is Mistral's marker."""
    tokenizer = Scripted(TEMPLATES[family], MARKER)
    last = len(tokenizer.characters) - 1
    script = [last if one == "\x00" else tokenizer.characters.index(one) for one in answer]
    end = last + 1
    starts: list[int] = []

    def table(path: tuple[int, ...]) -> torch.Tensor:
        at = len(path) - starts[0]
        logits = torch.zeros(end + 1)
        logits[script[at] if 0 <= at < len(script) else end] = 50
        return logits

    found = Model("toy", TableTarget(end + 1, table, context_length=2000), tokenizer, frozenset({end}))
    chat = tokenizer.chat

    def remember(*given: Any, **named: Any) -> list[int]:
        ids = chat(*given, **named)
        starts[:] = [len(ids)]
        return ids

    tokenizer.chat = remember  # type: ignore[method-assign]
    return found


def asked(family: str, answer: str, **about: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice, and the chunks of the same answer as a stream."""
    about = {"temperature": 0, "max_tokens": 400, **ASKED, **about}
    with client(service(model(family, answer))) as to:
        whole = to.post("/v1/chat/completions", json=about)
        assert whole.status_code == 200, whole.text
        return whole.json()["choices"][0], events(to, "/v1/chat/completions", **about)


def calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [one["function"] for one in message.get("tool_calls", ())]
    return [(one["name"], json.loads(one["arguments"])) for one in found]


@pytest.mark.parametrize(
    ("family", "answer", "content", "expected"),
    [
        ("hermes", ONE, "Let me see.", ["weather"]),
        ("hermes", ONE + SECOND, "Let me see.", ["weather", "time"]),
        ("hermes", ONE.removesuffix("</tool_call>"), "Let me see.", ["weather"]),
        ("llama3", LLAMA, None, ["weather"]),
        ("llama3", f"{LLAMA}; {LLAMA}", None, ["weather", "weather"]),
        ("mistral", "\x00" + MISTRAL, None, ["weather", "time"]),
        ("mistral", "Well, \x00" + MISTRAL, "Well, ", ["weather", "time"]),
        ("bare", '\x00weather{"city": "Rome"}\x00time{}', None, ["weather", "time"]),
    ],
)
def test_calls_are_read(family: str, answer: str, content: str | None, expected: list[str]) -> None:
    choice, chunks = asked(family, answer)
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"] or "").rstrip() == (content or "").rstrip()
    assert [name for name, _ in calls(choice["message"])] == expected
    assert calls(choice["message"])[0][1] == {"city": "Rome"}
    ids = [one["id"] for one in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert all(len(one) == 9 and one.isalnum() for one in ids) == (family in ("mistral", "bare"))
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert "".join(one.get("content") or "" for one in deltas).rstrip() == (content or "").rstrip()
    assert streamed_calls(deltas) == calls(choice["message"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def streamed_calls(deltas: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The calls of a stream, put together as clients do: the name first, then the arguments' fragments."""
    found: list[dict[str, Any]] = []
    for call in (call for one in deltas for call in one.get("tool_calls", ())):
        if "id" in call:
            assert call["index"] == len(found)
            assert call["type"] == "function"
            assert call["function"]["arguments"] == ""
            found.append({"function": dict(call["function"])})
        else:
            assert call["index"] == len(found) - 1
            found[-1]["function"]["arguments"] += call["function"]["arguments"]
    return calls({"tool_calls": found})


def test_arguments_are_streamed_as_they_are_written() -> None:
    _, chunks = asked("hermes", ONE)
    fragments = [
        call["function"]["arguments"]
        for one in chunks
        for call in one["choices"][0]["delta"].get("tool_calls", ())
        if "id" not in call
    ]
    assert len(fragments) > 3
    assert "".join(fragments) == '{"city": "Rome"}'


def test_a_call_that_is_cut_short_ends_for_its_length() -> None:
    at = len(ONE) - len('me"}}\n</tool_call>')
    choice, chunks = asked("hermes", ONE, max_tokens=at)
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Ro'


def test_logprobs_beside_calls_are_those_of_all_tokens() -> None:
    choice, chunks = asked("hermes", ONE, logprobs=True)
    parts = [one["choices"][0]["logprobs"] for one in chunks]
    assert [token for part in parts if part for token in part["content"]] == choice["logprobs"]["content"]
    assert "".join(one["token"] for one in choice["logprobs"]["content"]) == ONE


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("hermes", "No call < here <tool"),
        ("hermes", "<tool_call>{broken</tool_call> and more"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", "plain {text}"),
        ("mistral", "plain [text]"),
    ],
)
def test_what_is_no_call_stays_text(family: str, answer: str) -> None:
    choice, chunks = asked(family, answer)
    assert choice["message"] == {"role": "assistant", "content": answer, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks) == answer


def test_one_call_at_most_if_asked() -> None:
    choice, _ = asked("hermes", ONE + SECOND, parallel_tool_calls=False)
    assert [name for name, _ in calls(choice["message"])] == ["weather"]


def test_with_tool_choice_none_the_model_does_not_see_the_tools() -> None:
    choice, _ = asked("hermes", ONE, tool_choice="none")
    assert choice["message"]["content"] == ONE
    assert "tool_calls" not in choice["message"]


WEATHER = {"type": "function", "function": {"name": "weather"}}
REST = ' {"city": "Rome"}}'


@pytest.mark.parametrize(
    ("family", "beginning", "rest"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments":', REST + "\n</tool_call>"),
        ("llama3", '{"name": "weather", "parameters":', REST),
        ("mistral", '\x00[{"name": "weather", "arguments":', REST + "]"),
        ("bare", "\x00weather[ARGS]", '{"city": "Rome"}'),
    ],
)
def test_a_named_function_is_called_as_the_server_writes_the_calls_beginning(
    family: str, beginning: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    honest = Scripted.chat

    def chat(self: Scripted, messages: Any, tools: Any = None, answer: str = "") -> list[int]:
        written.append(answer)
        return honest(self, messages, tools)

    monkeypatch.setattr(Scripted, "chat", chat)
    choice, chunks = asked(family, rest, tool_choice=WEATHER)
    assert set(written) == {beginning.replace("\x00", MARKER)}
    assert calls(choice["message"]) == [("weather", {"city": "Rome"})]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert streamed_calls([one["choices"][0]["delta"] for one in chunks]) == calls(choice["message"])


def test_a_named_function_is_called_once_and_alone() -> None:
    choice, _ = asked("hermes", REST + "\n</tool_call>" + SECOND + " more", tool_choice=WEATHER)
    assert calls(choice["message"]) == [("weather", {"city": "Rome"})]
    assert choice["message"]["content"] is None


def test_a_required_call_names_a_function_itself() -> None:
    first, second = 'time", "arguments": {}}\n</tool_call>', SECOND.replace(">{", ">\n{").replace("}<", "}\n<")
    choice, _ = asked("hermes", first + second, tool_choice="required")
    assert calls(choice["message"]) == [("time", {}), ("time", {})]
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}}
    choice, _ = asked("hermes", REST + "\n</tool_call>", tool_choice=only)
    assert calls(choice["message"]) == [("weather", {"city": "Rome"})]


@pytest.mark.parametrize("family", ["hermes", "llama3"])
@pytest.mark.parametrize("answer", ['nothing", "arguments": {}}', "I would rather talk about the weather.", ""])
def test_a_required_call_is_one_of_an_offered_function_whatever_the_model_would_write(family: str, answer: str) -> None:
    choice, chunks = asked(family, answer, tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] in NAMES
    assert call["function"]["arguments"].startswith("{")
    if choice["finish_reason"] == "tool_calls":
        json.loads(call["function"]["arguments"])
    assert chunks


def test_arguments_of_a_demanded_call_are_a_json_object() -> None:
    choice, _ = asked("hermes", " no object at all", tool_choice=WEATHER, max_tokens=60)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith("{")
    with client(service(model("hermes", "x"))) as to:
        refused(to, 400, "contradict", tools=TOOLS, tool_choice=WEATHER, guided_json={"type": "object"})


def test_without_the_grammar_engine_a_call_is_demanded_by_its_beginning_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_grammar, "installed", lambda: False)
    choice, _ = asked("hermes", ' {"city": Rome}}</tool_call>', tool_choice=WEATHER)
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": Rome}'}


def test_a_required_call_that_the_model_does_not_write_is_an_error() -> None:
    """Where the server cannot express it as a grammar: calls in a list."""
    about: dict[str, Any] = {**ASKED, "tool_choice": "required", "temperature": 0}
    with client(service(model("mistral", 'nothing", "arguments": {}}]'))) as to:
        error = refused(to, 500, "did not write a call", **about)
        assert error["code"] == "tool_call_failed"
        last = events(to, "/v1/chat/completions", **about)[-1]
        assert last["error"]["code"] == "tool_call_failed"
        short = to.post("/v1/chat/completions", json={**about, "max_tokens": 2}).json()["choices"][0]
    assert short["finish_reason"] == "length"
    assert short["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_only_the_allowed_tools_are_shown() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}
    choice, _ = asked("hermes", SECOND, tool_choice=allowed)
    assert choice["message"]["content"] == SECOND
    with client(service(model("hermes", "x"))) as to:
        other = {"type": "function", "function": {"name": "other"}}
        refused(to, 400, "'other'", "not in 'tools'", tools=TOOLS, tool_choice=other)
        refused(to, 400, "'tool_choice' needs 'tools'", tool_choice=other)
        refused(to, 400, "tool_choice", tools=TOOLS, tool_choice={"type": "custom", "custom": {"name": "x"}})


def test_tools_need_a_template_that_shows_them() -> None:
    with client() as to:
        refused(to, 400, "no place for tools", tools=TOOLS)
        refused(to, 400, "no place for tools", messages=[{"role": "tool", "content": "5", "tool_call_id": "a"}])
    with client(service(model("hermes", "x"))) as to:
        refused(to, 400, "same name", tools=[TOOLS[0], TOOLS[0]])
        refused(to, 400, "tool_call_id", messages=[{"role": "tool", "content": "5"}])


def test_earlier_calls_reach_the_template_with_their_arguments_as_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
    ]
    served = service(model("hermes", "It is sunny."))
    [offered] = served.offered.values()
    shown: list[Any] = []
    chat = offered.model.tokenizer.chat

    def show(messages: Any, **named: Any) -> list[int]:
        shown.append((messages, named))
        return chat(messages, **named)

    monkeypatch.setattr(offered.model.tokenizer, "chat", show)
    with client(served) as to:
        answer = to.post("/v1/chat/completions", json={**ASKED, "messages": messages, "temperature": 0})
    assert answer.json()["choices"][0]["message"]["content"] == "It is sunny."
    [(given, named)] = shown
    assert given[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert given[2] == {"role": "tool", "content": "sunny", "tool_call_id": "a"}
    assert [one["function"]["name"] for one in named["tools"]] == sorted(NAMES)


def test_templates_show_tools() -> None:
    template = "{% for one in tools or [] %}{{ one.function | tojson }}{% endfor %}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert render(template, [{"role": "user", "content": "x"}], {}, tools) == '{"name": "weather"}x'
    assert render(template, [{"role": "user", "content": "x"}], {}) == "x"


def test_formats_are_known_by_their_templates() -> None:
    found = {name: format_of(text) for name, text in TEMPLATES.items()}
    assert found == {"hermes": HERMES, "mistral": MISTRAL_LIST, "bare": MISTRAL_BARE, "llama3": LLAMA3}
    assert format_of("{{ messages }}") is format_of("{% if tools %}{% endif %}") is None
    assert format_of("{{ tools }}<tool_call>\n<function=name>\n<parameter=x>") is None  # XML, not JSON

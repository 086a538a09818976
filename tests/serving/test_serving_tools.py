"""Tool calls: how each family of chat templates writes them, whole and in a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from outpace.model import Model
from outpace.models.chat_template import render
from outpace.serving.tools import ToolParser, family_of
from outpace.targets.table import TableTarget
from serving_support import Scripted, client, events, refused, service

NAMES = frozenset({"weather", "time"})
TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{% endif %}",
    "mistral": "{% if tools %}[TOOL_CALLS]{% endif %}",
    "llama3": "<|start_header_id|>{% if tools %}parameters{% endif %}",
}
MARKER = "[TOOL_CALLS]"
TOOLS = [{"type": "function", "function": {"name": one, "parameters": {"type": "object"}}} for one in sorted(NAMES)]
ASKED: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
HERMES = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
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
        ("hermes", HERMES, "Let me see.", ["weather"]),
        ("hermes", HERMES + SECOND, "Let me see.", ["weather", "time"]),
        ("hermes", HERMES.removesuffix("</tool_call>"), "Let me see.", ["weather"]),
        ("llama3", LLAMA, None, ["weather"]),
        ("llama3", f"{LLAMA}; {LLAMA}", None, ["weather", "weather"]),
        ("mistral", "\x00" + MISTRAL, None, ["weather", "time"]),
        ("mistral", "Well, \x00" + MISTRAL, "Well, ", ["weather", "time"]),
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
    assert all(len(one) == 9 and one.isalnum() for one in ids) == (family == "mistral")
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert "".join(one.get("content") or "" for one in deltas).rstrip() == (content or "").rstrip()
    streamed = [call for one in deltas for call in one.get("tool_calls", ())]
    assert [one["index"] for one in streamed] == list(range(len(expected)))
    assert calls({"tool_calls": streamed}) == calls(choice["message"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("hermes", "No call < here <tool"),
        ("hermes", "<tool_call>{broken</tool_call> and more"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", LLAMA + " and more"),
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
    choice, _ = asked("hermes", HERMES + SECOND, parallel_tool_calls=False)
    assert [name for name, _ in calls(choice["message"])] == ["weather"]


def test_with_tool_choice_none_the_model_does_not_see_the_tools() -> None:
    choice, _ = asked("hermes", HERMES, tool_choice="none")
    assert choice["message"]["content"] == HERMES
    assert "tool_calls" not in choice["message"]


def test_text_that_cannot_be_a_call_is_streamed_at_once() -> None:
    parser = ToolParser("hermes", NAMES, Scripted(""))
    assert [parser.push(one, ()) for one in ("Hello <", "b> <to", "ol_call", ">{", "}")] == [
        "Hello ",
        "<b> ",
        "",
        "",
        "",
    ]
    assert parser.finish() == ("<tool_call>{}", [])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_cannot_be_forced(choice: Any) -> None:
    with client(service(model("hermes", "x"))) as to:
        refused(to, 400, "'tool_choice' cannot be honoured", tools=TOOLS, tool_choice=choice)


def test_tools_need_a_template_that_shows_them() -> None:
    with client() as to:
        refused(to, 400, "no place for tools", tools=TOOLS)
        refused(to, 400, "no place for tools", messages=[{"role": "tool", "content": "5", "tool_call_id": "a"}])
    with client(service(model("hermes", "x"))) as to:
        refused(to, 400, "same name", tools=[TOOLS[0], TOOLS[0]])
        refused(to, 400, "tool_call_id", messages=[{"role": "tool", "content": "5"}])
        strict = {"type": "function", "function": {"name": "f", "strict": True}}
        refused(to, 400, "'strict' cannot be honoured", tools=[strict])


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


def test_families_are_known_by_their_templates() -> None:
    assert {name: family_of(text) for name, text in TEMPLATES.items()} == {name: name for name in TEMPLATES}
    assert family_of("{{ messages }}") is family_of("{% if tools %}{% endif %}") is None

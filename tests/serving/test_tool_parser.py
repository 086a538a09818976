"""The parser of calls: every division of an answer into pieces gives the same content and the same calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from outpace.serving import tool_parser
from outpace.serving.call_scanner import CallScanner
from outpace.serving.tool_parser import ToolParser
from outpace.serving.tools import HERMES, LLAMA3, MISTRAL, MISTRAL_BARE, Format
from serving_support import Scripted

NAMES = frozenset({"weather", "time"})
ROME, PARIS = '{"city": "Rome"}', '{"city": "Paris {[\\"", "deep": [1, {"a": null}]}'
FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "bare": MISTRAL_BARE}


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


# Recorded and made-up answers: format, text, content, calls.
ANSWERS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # As Qwen2.5-Coder-1.5B and 0.5B wrote them.
    (
        "hermes",
        '```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}\n```',
        "",
        [("weather", '{\n    "city": "Rome"\n  }')],
    ),
    (
        "hermes",
        f"```json\n{call('weather', ROME)}\n{call('time', PARIS)}\n```",
        "",
        [("weather", ROME), ("time", PARIS)],
    ),
    (
        "hermes",
        "```python\ndef add(a, b):\n    return a + b\n```",
        "```python\ndef add(a, b):\n    return a + b\n```",
        [],
    ),
    # By the template.
    ("hermes", f"<tool_call>\n{call('weather', ROME)}\n</tool_call>", "", [("weather", ROME)]),
    (
        "hermes",
        f"I see.\n\n<tool_call>{call('weather', ROME)}\n</tool_call>\n<tool_call>{call('time', PARIS)}</tool_call>\n",
        "I see.",
        [("weather", ROME), ("time", PARIS)],
    ),
    ("hermes", f"<tool_call>{call('weather', ROME)}</tool_call> Done.", " Done.", [("weather", ROME)]),
    ("hermes", f"<tool_call>{call('weather', ROME)}", "", [("weather", ROME)]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", "{}")]),
    ("hermes", f'<tool_call>{{"arguments": {ROME}, "name": "weather"}}</tool_call>', "", [("weather", ROME)]),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("weather", '{"a": 1}')],
    ),
    ("hermes", f"<tool_call>{call('other', ROME)}</tool_call>", f"<tool_call>{call('other', ROME)}</tool_call>", []),
    ("hermes", f"<tool_call>oops <tool_call>{call('time', '{}')}", "<tool_call>oops", [("time", "{}")]),
    ("hermes", "a < b, <tool, <tool_call", "a < b, <tool, <tool_call", []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", " \n<tool_call> \n", " \n<tool_call> \n", []),
    ("hermes", '{"name": "weather", "city": "Rome"}', '{"name": "weather", "city": "Rome"}', []),
    ("hermes", "", "", []),
    ("hermes", "```", "```", []),
    # The second call is broken: the first stays.
    (
        "hermes",
        f"<tool_call>{call('weather', ROME)}</tool_call>\n<tool_call>{{]",
        "\n<tool_call>{]",
        [("weather", ROME)],
    ),
    ("llama3", call("weather", ROME, "parameters"), "", [("weather", ROME)]),
    (
        "llama3",
        f"{call('weather', ROME, 'parameters')}; {call('time', '{}', 'parameters')}",
        "",
        [("weather", ROME), ("time", "{}")],
    ),
    ("llama3", f"<|python_tag|>{call('weather', ROME, 'parameters')}", "", [("weather", ROME)]),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3", f"{call('weather', ROME, 'parameters')} and more", " and more", [("weather", ROME)]),
    ("llama3", call("other", ROME), call("other", ROME), []),
    ("llama3", '{"name": "time"}', '{"name": "time"}', []),
    ("llama3", "plain {text}", "plain {text}", []),
    (
        "mistral",
        f"[TOOL_CALLS] [{call('weather', ROME)}, {call('time', PARIS)}]",
        "",
        [("weather", ROME), ("time", PARIS)],
    ),
    ("mistral", f"Well, [TOOL_CALLS]{call('weather', ROME)}", "Well,", [("weather", ROME)]),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "[1, 2] is a list", "[1, 2] is a list", []),
    (
        "bare",
        f"[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]time[CALL_ID]abc[ARGS]{PARIS}",
        "",
        [("weather", ROME), ("time", PARIS)],
    ),
    ("bare", "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}", []),
]


def parser(form: str, **about: Any) -> ToolParser:
    return ToolParser(FORMATS[form], NAMES, Scripted(""), **about)


def read(one: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """What the released parts amount to; it must be what the parser keeps for a whole answer."""
    content, calls = "", list[list[str]]()
    for released in (*[one.push(piece) for piece in pieces], one.finish("stop")):
        content += released.content
        for part in released.calls:
            if "id" in part:
                calls.append([part["function"]["name"], part["function"]["arguments"]])
            else:
                calls[part["index"]][1] += part["function"]["arguments"]
    found = [(name, arguments) for name, arguments in calls]
    assert (content, found) == (one.content, [(call.name, call.arguments) for call in one.calls])
    return content, found


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_answers(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        assert read(parser(form), pieces) == (content, calls)
    for _, arguments in calls:
        json.loads(arguments)


@st.composite
def divided(draw: st.DrawFn, text: st.SearchStrategy[str]) -> list[str]:
    whole = draw(text)
    cuts = sorted(draw(st.sets(st.integers(0, len(whole)), max_size=12)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


PARTS = st.sampled_from(
    [part for _, text, _, _ in ANSWERS for part in (text, text[: len(text) // 2], text[len(text) // 3 :])]
    + [
        "<tool_call>",
        "</tool_call>",
        "```json",
        "```",
        "[TOOL_CALLS]",
        "[ARGS]",
        '{"name": "time"',
        "\n",
        " ",
        "x",
        "}",
    ]
)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=150, deadline=None)
@given(pieces=divided(st.lists(PARTS, max_size=5).map("".join)), parallel=st.booleans())
def test_every_division_gives_the_same(form: str, pieces: list[str], parallel: bool) -> None:
    found = read(parser(form, parallel=parallel), pieces)
    assert found == read(parser(form, parallel=parallel), ["".join(pieces)])
    if not found[1]:
        assert found[0] == "".join(pieces)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_nothing_of_a_call_is_released_as_content(data: st.DataObject) -> None:
    form, _, content, calls = answer = data.draw(st.sampled_from([one for one in ANSWERS if one[3]]))
    one = parser(form)
    seen = ""
    for piece in data.draw(divided(st.just(answer[1]))):
        seen += one.push(piece).content
        assert content.startswith(seen)
    assert [each.name for each in one.calls] == [name for name, _ in calls]


def test_text_that_cannot_be_a_call_is_released_at_once() -> None:
    one = parser("hermes")
    assert [one.push(piece).content for piece in ("Hello <", "b> <to", "ol_call", ">{", "}")] == [
        "Hello",
        " <b>",
        "",
        "",
        " <tool_call>{}",
    ]
    assert one.finish("stop").content == ""


def test_a_marker_that_is_a_special_token_is_found_where_it_stands() -> None:
    tokenizer = Scripted("", "[TOOL_CALLS]")
    marker = len(tokenizer.characters) - 1
    one = ToolParser(MISTRAL, NAMES, tokenizer)
    text = f"[{call('weather', ROME)}]"
    before, after = tokenizer.encode("Well"), tokenizer.encode(text)
    # The text of some tokens comes after the tokens themselves.
    assert one.push("We", [*before, marker, *after]).calls == []
    assert one.push("ll" + text).calls[0]["function"]["name"] == "weather"
    assert one.content == "Well"


def test_one_call_at_most() -> None:
    text = f"<tool_call>{call('weather', ROME)}</tool_call> and <tool_call>{call('time', '{}')}</tool_call>"
    assert read(parser("hermes", parallel=False), [text]) == ("", [("weather", ROME)])


def test_long_answers_are_read_in_proportionate_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails to be a call is not read again for openings inside it."""
    seen = 0

    class Counting(CallScanner):
        def push(self, text: str) -> int:
            nonlocal seen
            read = super().push(text)
            seen += read
            return read

    monkeypatch.setattr(tool_parser, "CallScanner", Counting)
    text = '<tool_call>{"a": "' * 500
    assert read(parser("hermes"), list(text)) == (text, [])
    assert len(text) / 2 < seen <= 2 * len(text)


def test_formats_begin_a_forced_call_that_their_parser_reads() -> None:
    for form in FORMATS.values():
        for name in ("weather", None):
            one = ToolParser(form, NAMES, Scripted(""), forced=form.forced(name))
            rest = ' {"city": "Rome"}' if name else _named_rest(form)
            assert read(one, [rest]) == ("", [("weather", ROME)])


def _named_rest(form: Format) -> str:
    return f"weather{form.arguments} {ROME}"

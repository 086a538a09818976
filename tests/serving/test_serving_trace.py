"""``speculation.trace``: who drafted each token, whole and streamed, beside the text that the token stands for."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.engine.request import TARGET, TokenSource
from outpace.serving.trace import Tracer
from serving_support import CHAT, COMPLETE, USER, chat, client, complete, events, refused

PLD = {"method": "pld", "params": {"num_draft_tokens": 4}}
OFF = {"speculation": {"trace": True, "off": True}}


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def joined(trace: list[dict[str, Any]]) -> str:
    return "".join(one["text"] for one in trace)


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("stop", [None, "e"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_a_source_and_the_texts_are_the_answer(path: str, stop: str | None, stream: bool) -> None:
    body: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "abcabcabc"}
    about = {**body, "max_tokens": 80, "n": 2, "temperature": 0, "ignore_eos": True, "stop": stop}
    about["speculation"] = {**PLD, "trace": True}
    with client() as to:
        whole = to.post(path, json={"model": "toy", **about}).json()
        chunks = events(to, path, stream_options={"include_usage": True}, **about) if stream else []
    traces = {one["index"]: one["trace"] for one in whole["choices"]}
    if stream:
        traces = {index: [] for index in traces}
        for one in chunks:
            for choice in one["choices"]:
                traces[choice["index"]] += choice.get("trace", [])
    assert sum(map(len, traces.values())) == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        trace = traces[choice["index"]]
        assert trace == choice["trace"]
        assert joined(trace) == text_of(choice)
        assert {one["source"] for one in trace} <= {"pld", TARGET}
        rounds = [one["round"] for one in trace]
        assert rounds == sorted(rounds)
    drafted = sum(one["source"] == "pld" for trace in traces.values() for one in trace)
    assert drafted > 0 or stop
    assert drafted <= whole["usage"]["speculation"]["accepted"]


def test_without_speculation_every_token_is_the_targets() -> None:
    with client() as to:
        answer, plain = chat(to, **OFF), chat(to)
    [choice] = answer["choices"]
    assert [one["source"] for one in choice["trace"]] == [TARGET] * answer["usage"]["completion_tokens"]
    assert [one["round"] for one in choice["trace"]] == [*range(1, 1 + len(choice["trace"]))]
    assert text_of(choice) == text_of(plain["choices"][0])


def test_parts_are_named_as_outpace_methods_names_them() -> None:
    wish = {"method": "merge", "params": {"parts": ["PLD", "recycling"], "settings": {"PLD": PLD["params"]}}}
    with client() as to:
        answer = complete(to, prompt="abcabcabc", max_tokens=80, ignore_eos=True, speculation={**wish, "trace": True})
    found = {one["source"] for one in answer["choices"][0]["trace"]}
    assert found <= {"pld", "recycling", TARGET}
    assert len(found) > 1


def test_who_does_not_ask_gets_no_trace() -> None:
    with client() as to:
        assert "trace" not in chat(to, speculation={"trace": False})["choices"][0]
        assert not any("trace" in choice for one in events(to, CHAT, messages=USER) for choice in one["choices"])


def test_a_trace_that_is_no_boolean_is_refused() -> None:
    with client() as to:
        refused(to, 400, "speculation.trace", speculation={"trace": "yes"})
        refused(to, 400, "traces", "trace", speculation={"traces": True})


class Bytes:
    """Tokens are bytes: a character may need several."""

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")


def test_a_character_of_several_tokens_is_in_the_entry_of_the_last() -> None:
    tracer = Tracer(Bytes())
    first, second = TokenSource(TARGET, 1), TokenSource("pld", 2)
    raw = "aé".encode()
    assert [one["text"] for one in tracer.push("a", raw[:2], [first, second])] == ["a"]
    assert [one["text"] for one in tracer.push("é", raw[2:], [second])] == ["", "é"]
    assert tracer.push("", raw[1:2], [first]) == []
    assert [one["text"] for one in tracer.push("\ufffd", [], [], last=True)] == ["\ufffd"]


def test_text_that_is_held_back_has_its_entries_when_it_is_released() -> None:
    source, tracer = TokenSource(TARGET, 1), Tracer(Bytes())
    assert tracer.push("", b"a", [source]) == []
    assert [one["text"] for one in tracer.push("ab", b"bc", [source] * 2)] == ["a", "b"]
    assert [one["text"] for one in tracer.push("", b"", [], last=True)] == [""], "cut by a stop string"

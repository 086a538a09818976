"""A greedy stream that another replica goes on with: nothing twice, nothing missing, or an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from outpace.integrations.ray.messages import Head, Message, Tail
from outpace.integrations.ray.replay import ReplicasLost, StreamBroken, replayed
from outpace.integrations.ray.resumed_stream import ResumedStream, resumable
from ray_support import STREAM, WHOLE, scripted


def event(text: str | None = None, finish: str | None = None, id: str = "one", **delta: Any) -> bytes:
    delta |= {} if text is None else {"content": text}
    chunk = {"id": id, "created": 1, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def stream(*texts: str, id: str = "two") -> list[Message]:
    """A whole stream of these pieces."""
    body = [event("", id=id, role="assistant"), *(event(text, id=id) for text in texts), event(finish="stop", id=id)]
    return [Head(200, STREAM, id), *body, b"data: [DONE]\n\n", Tail(len(texts))]


def played(*replies: Any) -> tuple[str, list[dict[str, Any]], BaseException | None]:
    """The text and the events of a call whose attempts have these replies, and its error."""
    waiting = list(replies)
    got = b""
    error: BaseException | None = None

    async def run() -> None:
        nonlocal got
        async for message in replayed(lambda: waiting.pop(0), resumed=ResumedStream()):
            got += message if isinstance(message, bytes) else b""

    try:
        asyncio.run(run())
    except Exception as raised:
        error = raised
    events = [json.loads(one[6:]) for one in got.decode().split("\n\n") if one and one != "data: [DONE]"]
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events), events, error


BEGUN: list[Message] = [Head(200, STREAM, "one"), event("", role="assistant"), event("ab"), event("cd")]


@pytest.mark.parametrize("pieces", [("ab", "cd", "ef"), ("abcdef",), ("a", "bc", "de", "f"), ("abcd", "ef")])
def test_the_rest_comes_from_the_other_replica_however_it_is_divided(pieces: tuple[str, ...]) -> None:
    text, events, error = played(scripted(*BEGUN, dies=True), scripted(*stream(*pieces)))
    assert (text, error) == ("abcdef", None)
    assert {one["id"] for one in events} == {"one"}
    assert [one["choices"][0]["finish_reason"] for one in events].count("stop") == 1
    assert sum("role" in one["choices"][0]["delta"] for one in events) == 1


def test_a_stream_survives_two_deaths() -> None:
    text, _, error = played(
        scripted(*BEGUN, dies=True), scripted(*stream("abcd", "ef", "gh")[:4], dies=True), scripted(*stream("abcdefgh"))
    )
    assert (text, error) == ("abcdefgh", None)


def test_only_the_end_was_missing() -> None:
    text, events, error = played(scripted(*BEGUN, dies=True), scripted(*stream("abcd")))
    assert (text, error) == ("abcd", None)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("pieces", [("abX", "d"), ("ab",), ()])
def test_another_text_ends_the_stream_with_an_error(pieces: tuple[str, ...]) -> None:
    text, _, error = played(scripted(*BEGUN, dies=True), scripted(*stream(*pieces)))
    assert text == "abcd"
    assert isinstance(error, StreamBroken)


def test_a_refusal_and_too_many_deaths_end_it_too() -> None:
    refusal: list[Message] = [Head(429, WHOLE, "two"), b"{}", Tail()]
    assert isinstance(played(scripted(*BEGUN, dies=True), scripted(*refusal))[2], StreamBroken)
    assert isinstance(played(*(scripted(*BEGUN, dies=True) for _ in range(3)))[2], StreamBroken)
    assert isinstance(played(*(scripted(dies=True) for _ in range(3)))[2], ReplicasLost)


@pytest.mark.parametrize(
    "more",
    [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}],
    ids=lambda one: next(iter(one)),
)
def test_what_is_more_than_text_is_not_sent_twice(more: dict[str, Any]) -> None:
    """A model's reasoning has no content, so nothing shows how much of it the caller has."""
    begun = [*BEGUN[:2], event(**more)]
    _, events, error = played(scripted(*begun, dies=True), scripted(*stream("ab")))
    assert isinstance(error, StreamBroken)
    assert len(events) == 2


def test_fields_without_a_value_are_nothing_more() -> None:
    begun = [*BEGUN[:2], event("ab", reasoning=None, tool_calls=[])]
    text, _, error = played(scripted(*begun, dies=True), scripted(*stream("abc")))
    assert (text, error) == ("abc", None)


def test_which_requests_go_on() -> None:
    plain = {"stream": True, "temperature": 0, "messages": []}
    assert resumable(json.dumps(plain).encode())
    others: list[dict[str, Any]] = [
        {"temperature": 1},
        {"temperature": None},
        {"stream": False},
        {"n": 2},
        {"tools": [{}]},
        {"logprobs": True},
        {"logprobs": 0},
        {"echo": True},
        {"prompt": ["a", "b"]},
        {"speculation": {"trace": True}},
        {"return_token_ids": True},
        {"prompt_logprobs": 1},
    ]
    for other in others:
        assert not resumable(json.dumps(plain | other).encode()), other
    assert not resumable(b"{")
    assert not resumable(b"[]")

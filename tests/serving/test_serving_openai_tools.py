"""Conformance: tool calls through the real openai client, whole and streamed, sync and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage

from live_support import live
from outpace.serving.offered import Defaults
from outpace.serving.service import Service
from test_serving_tools import ONE, SECOND, TOOLS, model

ASKED: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "Which weather has Rome, and what time is it?"}],
    "tools": TOOLS,
    "temperature": 0,
    "max_tokens": 400,
}
EXPECTED = [("weather", {"city": "Rome"}), ("time", {})]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live(Service([model("hermes", ONE + SECOND)], defaults=Defaults(method="pld"))) as found:
        yield f"{found}/v1"


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as found:
        yield found


def calls(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    found = [one for one in message.tool_calls or () if one.type == "function"]
    assert len({one.id for one in found}) == len(found)
    return [(one.function.name, json.loads(one.function.arguments)) for one in found]


def check_whole(answer: ChatCompletion) -> None:
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "").strip() == "Let me see."
    assert calls(choice.message) == EXPECTED


def check_streamed(chunks: Iterable[ChatCompletionChunk]) -> None:
    """Put the calls together as the client's documentation does: by index, name first, then fragments of arguments."""
    found: dict[int, tuple[str, str]] = {}
    text, ends, fragments = "", [], 0
    for choice in (one.choices[0] for one in chunks if one.choices):
        text += choice.delta.content or ""
        ends += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            name, arguments = found.get(call.index, ("", ""))
            assert bool(call.id) == (not name)
            fragments += 1
            found[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    assert ends == ["tool_calls"]
    assert text.strip() == "Let me see."
    assert [(name, json.loads(arguments)) for _, (name, arguments) in sorted(found.items())] == EXPECTED
    assert fragments > len(EXPECTED) + 3  # arguments come as they are written


def test_a_whole_answer_calls_tools(client: openai.OpenAI) -> None:
    check_whole(client.chat.completions.create(**ASKED))


def test_a_stream_calls_tools(client: openai.OpenAI) -> None:
    check_streamed(client.chat.completions.create(**ASKED, stream=True))


def test_the_clients_own_reader_of_streams_takes_the_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**ASKED) as stream:
        ended = [(one.name, one.index) for one in stream if one.type == "tool_calls.function.arguments.done"]
        check_whole(stream.get_final_completion())
    assert ended == [("weather", 0), ("time", 1)]


def test_the_async_client_calls_tools_whole_and_streamed(address: str) -> None:
    async def ask() -> tuple[ChatCompletion, list[ChatCompletionChunk]]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(**ASKED)
            return whole, [one async for one in await client.chat.completions.create(**ASKED, stream=True)]

    whole, streamed = asyncio.run(ask())
    check_whole(whole)
    check_streamed(streamed)


def test_results_of_tools_go_back_to_the_model(client: openai.OpenAI) -> None:
    """The second turn of an agent: the client's own message with its calls, and an answer for each."""
    message = client.chat.completions.create(**ASKED).choices[0].message
    results = [{"role": "tool", "tool_call_id": one.id, "content": "18"} for one in message.tool_calls or ()]
    turns = [*ASKED["messages"], message, *results]
    check_whole(client.chat.completions.create(**ASKED | {"messages": turns}))


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_is_not_offered_is_a_bad_request(client: openai.OpenAI, stream: bool) -> None:
    other: Any = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="other"):
        client.chat.completions.create(**ASKED, tool_choice=other, stream=stream)


def test_tools_may_be_offered_and_not_called(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(**ASKED, tool_choice="none").choices[0].message
    assert not message.tool_calls

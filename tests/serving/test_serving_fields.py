"""Every field of OpenAI's API is honoured, accepted because it changes nothing, or refused by name.

The fields are those of the installed ``openai`` client, so that a field of a later client is noticed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionPredictionContentParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
    completion_create_params as chats,
)
from openai.types.chat.chat_completion_message_function_tool_call_param import Function
from openai.types.shared_params import FunctionDefinition
from pydantic import ValidationError

from outpace.serving import schemas
from outpace.serving.fields import Fields
from outpace.serving.schemas import ChatRequest, CompletionRequest
from serving_support import CHAT, COMPLETE, USER, client, refused, service
from test_serving_tools import ASKED, ONE, TOOLS, model

CHAT_HONOURED: dict[str, Any] = {
    "messages": USER,
    "model": "toy",
    "frequency_penalty": 0.5,
    "logit_bias": {"4": 2},
    "logprobs": True,
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "abc"},
    "presence_penalty": 0.5,
    "response_format": {"type": "json_object"},
    "seed": 1,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "tool_choice": "auto",
    "tools": TOOLS,
    "top_logprobs": 2,
    "top_p": 0.5,
}
ACCEPTED: dict[str, Any] = {
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "in_memory",
    "reasoning_effort": "none",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "user": "u",
    "verbosity": "medium",
}
REFUSED: dict[str, Any] = {
    "audio": {"voice": "x", "format": "wav"},
    "function_call": "auto",
    "functions": [],
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "service_tier": "priority",
    "store": True,
    "verbosity": "low",
    "web_search_options": {},
}
COMPLETION_HONOURED: dict[str, Any] = {
    "prompt": "ab",
    "model": "toy",
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 0.5,
    "logit_bias": {"4": 2},
    "logprobs": 2,
    "max_tokens": 3,
    "n": 2,
    "presence_penalty": 0.5,
    "seed": 1,
    "stop": "x",
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
}
NEEDS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS},
}


def keys(*kinds: Any) -> set[str]:
    return {key for kind in kinds for key in kind.__required_keys__ | kind.__optional_keys__}


def test_no_field_of_the_client_is_forgotten() -> None:
    chat = keys(chats.CompletionCreateParamsStreaming, chats.CompletionCreateParamsNonStreaming)
    assert chat == CHAT_HONOURED.keys() | ACCEPTED.keys() | REFUSED.keys()
    completion = keys(completions.CompletionCreateParamsStreaming, completions.CompletionCreateParamsNonStreaming)
    assert completion == COMPLETION_HONOURED.keys() | {"user", "suffix"}


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (ChatRequest, chats.CompletionCreateParamsStreaming),
        (CompletionRequest, completions.CompletionCreateParamsStreaming),
        (schemas.StreamOptions, ChatCompletionStreamOptionsParam),
        (schemas.ChatMessage, ChatCompletionSystemMessageParam),
        (schemas.ChatMessage, ChatCompletionDeveloperMessageParam),
        (schemas.ChatMessage, ChatCompletionUserMessageParam),
        (schemas.ChatMessage, ChatCompletionAssistantMessageParam),
        (schemas.ChatMessage, ChatCompletionToolMessageParam),
        (schemas.TextPart, ChatCompletionContentPartTextParam),
        (schemas.ToolCall, ChatCompletionMessageFunctionToolCallParam),
        (schemas.CalledFunction, Function),
        (schemas.Tool, ChatCompletionFunctionToolParam),
        (schemas.FunctionTool, FunctionDefinition),
        (schemas.NamedTool, ChatCompletionNamedToolChoiceParam),
        (schemas.PredictedText, ChatCompletionPredictionContentParam),
    ],
)
def test_every_field_of_every_object_is_known(own: type[Fields], theirs: Any) -> None:
    assert keys(theirs) <= own.model_fields.keys() | own.REFUSED.keys() | own.NEUTRAL.keys()


def ask(path: str, base: Mapping[str, Any], name: str, value: Any) -> int:
    with client(service(model("hermes", ONE))) as to:
        body = {"model": "toy", **base, "max_tokens": 8, **NEEDS.get(name, {}), name: value}
        if name == "max_completion_tokens":
            del body["max_tokens"]
        return to.post(path, json=body).status_code


@pytest.mark.parametrize("name", sorted(CHAT_HONOURED.keys() | ACCEPTED.keys()))
def test_fields_of_a_chat_that_are_taken(name: str) -> None:
    for values in (CHAT_HONOURED, ACCEPTED):
        if name in values:
            assert ask(CHAT, {"messages": ASKED["messages"]}, name, values[name]) == 200


@pytest.mark.parametrize("name", sorted(COMPLETION_HONOURED))
def test_fields_of_a_completion_that_are_taken(name: str) -> None:
    with client() as to:
        body = {"model": "toy", "prompt": "ab", **NEEDS.get(name, {}), name: COMPLETION_HONOURED[name]}
        answer = to.post(COMPLETE, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_of_a_chat_that_are_refused(name: str) -> None:
    with client() as to:
        assert refused(to, 400, f"'{name}' cannot be honoured", **{name: REFUSED[name]})["param"] == name
        assert to.post(CHAT, json={"model": "toy", "messages": USER, "max_tokens": 2, name: None}).status_code == 200


def test_a_cache_breakpoint_is_accepted_without_a_lifetime() -> None:
    part: dict[str, Any] = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    with client() as to:
        body = {"model": "toy", "max_tokens": 2, "messages": [{"role": "user", "content": [part]}]}
        assert to.post(CHAT, json=body).status_code == 200
        part["prompt_cache_breakpoint"]["ttl"] = "12h"
        error = refused(to, 400, "'prompt_cache_breakpoint' cannot be honoured", messages=body["messages"])
    assert error["param"] == "messages.0.content.0.prompt_cache_breakpoint"


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("messages.0.content.0.type", "messages", [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]),
        ("messages.1.role", "messages", [*USER, {"role": "boss", "content": "x"}]),
        ("messages.0.role", "messages", [{"content": "x"}]),
        ("stop.1", "stop", ["x", 5]),
        ("stop", "stop", 5),
        ("stop", "stop", ["x"] * 17),
        ("tool_choice", "tool_choice", "always"),
        ("tool_choice.function.name", "tool_choice", {"type": "function", "function": {}}),
        ("speculation.params", "speculation", {"params": 5}),
    ],
)
def test_an_error_names_the_field_as_the_caller_wrote_it(where: str, field: str, value: Any) -> None:
    with client() as to:
        assert refused(to, 400, f"'{where}'", **{field: value})["param"] == where


def test_a_list_that_is_too_long_is_told_so() -> None:
    with client() as to:
        refused(to, 400, "'stop'", "at most 16 items", stop=["x"] * 17)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1] * 5000 + ["x"]}),
        (CompletionRequest, {"prompt": [[-1] * 5000] * 3}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(at): "x" for at in range(5000)}}),
        (ChatRequest, {"messages": [1] * 5000}),
        (ChatRequest, {"messages": [{}] * 5000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 5000}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * 5000}]}),
        (ChatRequest, {"messages": USER, "metadata": {str(at): 1 for at in range(5000)}}),
        (ChatRequest, {"messages": USER, "guided_choice": [1] * 5000}),
        (ChatRequest, {"messages": USER, "prediction": {"type": "content", "content": [1] * 5000}}),
    ],
)
def test_a_body_full_of_wrong_entries_costs_a_few_errors(kind: type[Fields], body: dict[str, Any]) -> None:
    """Each would take a microsecond and a kilobyte on the event loop, and a body has room for a million."""
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate({"model": "toy", **body})
    assert wrong.value.error_count() <= 12


def test_an_object_with_too_many_entries_is_told_so() -> None:
    with client() as to:
        error = refused(to, 400, "'logit_bias'", "1024 entries", logit_bias={str(at): 1 for at in range(1025)})
    assert error["param"] == "logit_bias"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_what_is_no_text_is_refused_in_words(kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": kind, kind: {"url": "data:x"}}]}]
    with client() as to:
        error = refused(to, 400, f"'{kind}' cannot be honoured", "text only", messages=messages)
    assert error["param"] == f"messages.0.content.0.{kind}"


def test_what_the_engine_refuses_names_its_field() -> None:
    with client() as to:
        assert refused(to, 400, "token 9999", logit_bias={"9999": 1})["param"] == "logit_bias"
        assert refused(to, 400, "token 9999", path=COMPLETE, prompt=[9999])["param"] == "prompt"


def test_the_suffix_of_a_completion_is_refused() -> None:
    with client() as to:
        refused(to, 400, "'suffix' cannot be honoured", path=COMPLETE, suffix="x")

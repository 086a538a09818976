"""From a chat's messages and tools to the prompt's token ids, by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import Any

from outpace.core.errors import BadInput
from outpace.models.base import ChatTokenizer
from outpace.serving.errors import ApiError
from outpace.serving.schemas import ChatMessage, ChatRequest, TextPart, ToolCall
from outpace.serving.tools import ToolParser, family_of


def prompt_ids(tokenizer: ChatTokenizer, asked: ChatRequest) -> list[int]:
    """The prompt. Raises ApiError for messages that are incomplete or that the template refuses."""
    if not tokenizer.has_chat_template:
        raise ApiError(
            f"model '{asked.model}' has no chat template, so it cannot chat; use /v1/completions", param="messages"
        )
    messages = [_message(at, one) for at, one in enumerate(asked.messages)]
    shown = [one.model_dump(exclude_none=True) for one in asked.tools or ()] if _offered(asked) else []
    with_tools = bool(shown) or any("tool_calls" in one or one["role"] == "tool" for one in messages)
    if with_tools:
        _family(tokenizer, asked.model)
    try:
        if with_tools:
            ids: list[int] = tokenizer.chat(messages, tools=shown)  # type: ignore[call-arg]
            return ids
        return tokenizer.chat(messages)
    except BadInput as error:
        raise ApiError(str(error), param="messages") from error


def tool_parser(tokenizer: ChatTokenizer, asked: ChatRequest) -> ToolParser | None:
    """What reads calls in one answer; None where no tools are offered. Raises ApiError for what cannot be honoured."""
    choice = asked.tool_choice
    if choice is not None and not asked.tools:
        raise ApiError("'tool_choice' needs 'tools'", param="tool_choice")
    if choice == "required" or isinstance(choice, dict):
        raise ApiError(
            "'tool_choice' cannot be honoured: the output cannot be constrained to a call; send auto or none, and ask "
            "for the call in the prompt",
            param="tool_choice",
            code="unsupported_value",
        )
    if asked.parallel_tool_calls is not None and not asked.tools:
        raise ApiError("'parallel_tool_calls' needs 'tools'", param="parallel_tool_calls")
    if not _offered(asked):
        return None
    names = [one.function.name for one in asked.tools or ()]
    if len(set(names)) < len(names):
        raise ApiError("two tools have the same name", param="tools")
    return ToolParser(
        _family(tokenizer, asked.model), frozenset(names), tokenizer, parallel=asked.parallel_tool_calls is not False
    )


def joined(content: str | Seq[TextPart] | None) -> str:
    """A content's text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(one.text for one in content)


def _offered(asked: ChatRequest) -> bool:
    """With ``tool_choice`` none the model does not see the tools."""
    return bool(asked.tools) and asked.tool_choice != "none"


def _family(tokenizer: ChatTokenizer, model: str) -> str:
    family = family_of(getattr(tokenizer, "template", ""))
    if family is None:
        raise ApiError(
            f"the chat template of model '{model}' has no place for tools, or writes calls in a way that is not known "
            "here; leave out tools and messages about calls",
            param="tools",
            code="unsupported_field",
        )
    return family


def _message(at: int, one: ChatMessage) -> dict[str, Any]:
    """A message as templates read it."""
    where = f"messages.{at}"
    if one.content is None and not one.tool_calls:
        raise ApiError(f"'{where}.content' is missing", param=f"{where}.content", code="missing_field")
    if one.tool_calls and one.role != "assistant":
        raise ApiError(f"'{where}.tool_calls': only messages of the assistant have calls", param=f"{where}.tool_calls")
    if (one.role == "tool") != (one.tool_call_id is not None):
        raise ApiError(
            f"'{where}.tool_call_id': messages of role tool have one, and no others", param=f"{where}.tool_call_id"
        )
    found: dict[str, Any] = {"role": "system" if one.role == "developer" else one.role, "content": joined(one.content)}
    if one.name is not None:
        found["name"] = one.name
    if one.tool_call_id is not None:
        found["tool_call_id"] = one.tool_call_id
    if one.tool_calls:
        found["tool_calls"] = [_call(call) for call in one.tool_calls]
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they get them as an object."""
    arguments: Any = call.function.arguments
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, dict):
        arguments = read
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

"""From a chat's messages and tools to the prompt's token ids, by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import Any

from outpace.core.errors import BadInput
from outpace.models.base import ChatTokenizer
from outpace.serving.errors import ApiError
from outpace.serving.schemas import AllowedTools, ChatMessage, ChatRequest, NamedTool, TextPart, Tool, ToolCall
from outpace.serving.tool_parser import ToolParser
from outpace.serving.tools import Format, format_of


def prompt_ids(tokenizer: ChatTokenizer, asked: ChatRequest, parser: ToolParser | None = None) -> list[int]:
    """The prompt; with the beginning of a call where ``parser`` demands one.

    Raises ApiError for messages that are incomplete or that the template refuses.
    """
    if not tokenizer.has_chat_template:
        raise ApiError(
            f"model '{asked.model}' has no chat template, so it cannot chat; use /v1/completions", param="messages"
        )
    messages = [_message(at, one) for at, one in enumerate(asked.messages)]
    shown = [one.model_dump(exclude_none=True) for one in offered_tools(asked)]
    with_tools = bool(shown) or any("tool_calls" in one or one["role"] == "tool" for one in messages)
    if with_tools:
        _format(tokenizer, asked.model)
    try:
        if with_tools:
            forced = parser.forced if parser else ""
            ids: list[int] = tokenizer.chat(messages, tools=shown, answer=forced)  # type: ignore[call-arg]
            return ids
        return tokenizer.chat(messages)
    except BadInput as error:
        raise ApiError(str(error), param="messages") from error


def tool_parser(tokenizer: ChatTokenizer, asked: ChatRequest) -> ToolParser | None:
    """What reads calls in one answer; None where no tools are offered. Raises ApiError for what cannot be honoured."""
    choice, tools = asked.tool_choice, offered_tools(asked)
    if choice is not None and not asked.tools:
        raise ApiError("'tool_choice' needs 'tools'", param="tool_choice")
    if asked.parallel_tool_calls is not None and not asked.tools:
        raise ApiError("'parallel_tool_calls' needs 'tools'", param="parallel_tool_calls")
    if not tools:
        return None
    names = [one.function.name for one in tools]
    if len(set(names)) < len(names):
        raise ApiError("two tools have the same name", param="tools")
    form = _format(tokenizer, asked.model)
    named = isinstance(choice, NamedTool)
    required = choice == "required" or (isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required")
    forced = form.forced(names[0] if len(names) == 1 else None) if named or required else ""
    return ToolParser(form, frozenset(names), tokenizer, asked.parallel_tool_calls is not False and not named, forced)


def joined(content: str | Seq[TextPart] | None) -> str:
    """A content's text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(one.text for one in content)


def offered_tools(asked: ChatRequest) -> list[Tool]:
    """The tools that the model sees: none with ``tool_choice`` none; those that it names. Raises ApiError."""
    choice, tools = asked.tool_choice, asked.tools or []
    if choice == "none":
        return []
    if not isinstance(choice, NamedTool | AllowedTools):
        return tools
    wanted = [one.name for one in choice.functions]
    known = {one.function.name for one in tools}
    for name in wanted:
        if tools and name not in known:
            raise ApiError(f"'tool_choice' names '{name}', which is not in 'tools'", param="tool_choice")
    return [one for one in tools if one.function.name in wanted]


def _format(tokenizer: ChatTokenizer, model: str) -> Format:
    found = format_of(getattr(tokenizer, "template", ""))
    if found is None:
        raise ApiError(
            f"the chat template of model '{model}' has no place for tools, or writes calls in a way that is not known "
            "here; leave out tools and messages about calls",
            param="tools",
            code="unsupported_field",
        )
    return found


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

"""ResumedStream: a stream of a greedy answer that another replica goes on with.

A greedy answer is the same from every replica with the same weights, so another one computes it again, and what was
sent already is left out. Where the other answer does not begin with what was sent, because another kind of processor
rounds differently, the stream ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import to_json

from outpace.core.files import parse_json
from outpace.integrations.ray.messages import Head, Message, ReplicaLost

_PREVENTING = (
    *("tools", "logprobs", "top_logprobs", "echo", "best_of"),
    *("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
)
"""Fields with which an event has more than text."""
_OF_TEXT = {"index", "text", "delta", "role", "content", "finish_reason", "stop_reason"}
"""What a choice of an event has, or its delta, where it is text alone."""


def resumable(body: bytes) -> bool:
    """Whether a request asks for one greedy stream of plain text."""
    try:
        asked = parse_json(body)
    except ValueError:
        return False
    if not isinstance(asked, dict) or not asked.get("stream") or asked.get("temperature") != 0:
        return False
    speculation = asked.get("speculation")
    traced = isinstance(speculation, dict) and speculation.get("trace")
    single = asked.get("n") in (None, 1) and isinstance(asked.get("prompt", ""), str)
    return single and not traced and all(asked.get(name) is None or asked[name] is False for name in _PREVENTING)


class ResumedStream:
    """What was sent of a stream, and the rest of the same stream from another replica."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []

    def sent(self, part: bytes) -> None:
        """Note a part that was passed on."""
        self._sent.append(part)

    async def rest(self, messages: AsyncGenerator[Message, None]) -> AsyncGenerator[Message, None]:
        """What is left of a complete stream. Raises ValueError where it is not a continuation."""
        first, text = self._text()
        waiting = b""
        async for message in messages:
            if isinstance(message, Head):
                if not message.streams:
                    raise ValueError("the other replica refused the request")
            elif isinstance(message, bytes):
                *events, waiting = (waiting + message).split(b"\n\n")
                kept = []
                for event in events:
                    left, text = _left(event, first, text)
                    kept += [left + b"\n\n"] if left else []
                if kept:
                    yield b"".join(kept)
            else:
                yield message
                return
        raise ReplicaLost("the reply has no end")

    def _text(self) -> tuple[dict[str, Any], str]:
        """The first event and the text of all."""
        whole = b"".join(self._sent)
        if not whole.endswith(b"\n\n"):
            raise ValueError("a part of an event was sent")
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in whole.split(b"\n\n")[:-1]]
        if not all(map(_is_text, chunks)):
            raise ValueError("more than text was sent, which would be sent twice")
        return chunks[0], "".join(_content(chunk) for chunk in chunks)


def _left(event: bytes, first: dict[str, Any], text: str) -> tuple[bytes, str]:
    """What is sent of an event, and the text that later ones must still repeat. Raises ValueError for another text."""
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        return event, text
    chunk = json.loads(data)
    choices = chunk.get("choices") or []
    content = _content(chunk)
    common = min(len(content), len(text))
    if content[:common] != text[:common] or (text[common:] and any(one.get("finish_reason") for one in choices)):
        raise ValueError("the other replica's answer is not the same")
    beginning = any("role" in (one.get("delta") or {}) for one in choices)
    if beginning or (common and common == len(content)):
        return b"", text[common:]
    if common:
        _set_content(chunk, content[common:])
    chunk |= {name: first[name] for name in ("id", "created") if name in first}
    return b"data: " + to_json(chunk), text[common:]


def _is_text(chunk: dict[str, Any]) -> bool:
    """Whether an event has nothing but text; a model's reasoning, calls of tools and ids of tokens are more."""
    parts = [part for one in chunk.get("choices") or [] for part in (one, one.get("delta") or {})]
    return all(name in _OF_TEXT or not value for part in parts for name, value in part.items())


def _content(chunk: dict[str, Any]) -> str:
    found = ""
    for one in chunk.get("choices") or []:
        found += (one.get("delta") or {}).get("content") or one.get("text") or ""
    return found


def _set_content(chunk: dict[str, Any], content: str) -> None:
    [choice] = chunk["choices"]
    if "delta" in choice:
        choice["delta"]["content"] = content
    else:
        choice["text"] = content

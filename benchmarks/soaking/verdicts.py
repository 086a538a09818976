"""Verdicts: whether an answer is one that its request may get."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from soaking.caller import Answer
from soaking.traffic import CHAT, Wish

REASONS = ("stop", "length", "tool_calls")


@dataclass(frozen=True, slots=True)
class Choice:
    """What one choice of an answer came to."""

    text: str
    finish_reason: str | None
    calls: int = 0
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """An answer, read: its choices, or the error that ended it."""

    choices: tuple[Choice, ...] = ()
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    text: str = ""
    """What is wrong with its form; empty: nothing."""


def judged(wish: Wish, answer: Answer, ending: bool = False) -> tuple[str, Read | None]:  # noqa: PLR0911
    """What is wrong with an answer, "" for nothing; and the answer, where it could be read. ``ending``: the server has
    been sent SIGTERM, so it may refuse, and connections that it has not accepted may be closed."""
    if answer.hung:
        return "no end of the answer in time", None
    if wish.manners.leaves and not answer.complete:
        return "", None
    if not answer.status:
        return ("" if ending else f"no answer: {answer.failure}"), None
    if not answer.complete:
        return f"status {answer.status}, then {answer.failure or 'nothing'} after {len(answer.body)} bytes", None
    if answer.status not in (*wish.allowed, *((503,) if ending else ())):
        return f"status {answer.status}: {answer.body[:300]!r}", None
    if wish.path == "/ready":  # whose 503 is no error
        return "", None
    if answer.status != 200:
        return _refusal(answer), None
    if not wish.path.startswith("/v1/c") or wish.asked is None:
        return "", None
    read = _stream(wish, answer) if wish.streams else _whole(wish, answer)
    return read.text or _content(wish, read), read


def _refusal(answer: Answer) -> str:
    try:
        body = answer.json()
    except ValueError:
        return f"status {answer.status} without JSON: {answer.body[:200]!r}"
    if not isinstance(body, dict) or not _is_error(body.get("error")):
        return f"status {answer.status} without an error in OpenAI's form: {answer.body[:200]!r}"
    if answer.status == 429 and int(answer.headers.get("retry-after", "0")) < 1:
        return "status 429 without Retry-After"
    return ""


def _is_error(error: Any) -> bool:
    return isinstance(error, dict) and set(error) == {"message", "type", "param", "code"} and bool(error["message"])


def _whole(wish: Wish, answer: Answer) -> Read:
    try:
        body = answer.json()
    except ValueError:
        return Read(text=f"status 200 without JSON: {answer.body[:200]!r}")
    choices = []
    for at, one in enumerate(body["choices"]):
        if one["index"] != at:
            return Read(text="choices out of order")
        message = one.get("message", {})
        text = (message.get("content") or "") if wish.path == CHAT else one["text"]
        calls = len(message.get("tool_calls") or ())
        choices.append(Choice(text, one["finish_reason"], calls, _logprobs(one.get("logprobs"))))
    return Read(tuple(choices), body["usage"])


def _stream(wish: Wish, answer: Answer) -> Read:  # noqa: PLR0911
    lines = [line for line in answer.body.decode().split("\n") if line]
    if not all(line.startswith("data: ") for line in lines):
        return Read(text="a line of the stream is no event")
    events = [line.removeprefix("data: ") for line in lines]
    if not events or events[-1] != "[DONE]" or events.count("[DONE]") != 1:
        return Read(text=f"the stream does not end with [DONE]: {events[-1:]}")
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    calls: dict[int, int] = {}
    logprobs: dict[int, tuple[float, ...]] = {}
    usage = None
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            if not _is_error(event["error"]):
                return Read(text=f"an error event in no known form: {event}")
            return Read(error=event["error"])
        usage = event.get("usage") or usage
        for one in event["choices"]:
            index = one["index"]
            if index in reasons:
                return Read(text=f"choice {index} goes on after its end")
            delta = one.get("delta", {})
            part = (delta.get("content") or "") if wish.path == CHAT else one["text"]
            texts[index] = texts.get(index, "") + part
            calls[index] = calls.get(index, 0) + len(delta.get("tool_calls") or ())
            logprobs[index] = logprobs.get(index, ()) + _logprobs(one.get("logprobs"))
            if one["finish_reason"] is not None:
                reasons[index] = one["finish_reason"]
    if sorted(reasons) != list(range(len(texts))):
        return Read(text=f"choices without an end: {sorted(set(texts) - set(reasons))}")
    found = tuple(Choice(texts[at], reasons[at], calls[at], logprobs[at]) for at in sorted(texts))
    return Read(found, usage)


def _logprobs(found: Any) -> tuple[float, ...]:
    if not found:
        return ()
    if "content" in found:
        return tuple(one["logprob"] for one in found["content"])
    return tuple(found["token_logprobs"])


def _content(wish: Wish, read: Read) -> str:  # noqa: PLR0911
    """Whether it is what was asked for."""
    asked = wish.asked or {}
    if read.error is not None:
        return ""
    prompts = asked.get("prompt")
    many = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    if len(read.choices) != (asked.get("n") or 1) * many:
        return f"{len(read.choices)} choices, {asked.get('n') or 1} asked for"
    stops = asked.get("stop") or ()
    for one in read.choices:
        if one.finish_reason not in REASONS:
            return f"finish_reason {one.finish_reason}"
        if not asked.get("echo") and any(stop in one.text for stop in ([stops] if isinstance(stops, str) else stops)):
            return f"a stop word is in the text {one.text!r}"
    most = asked.get("max_tokens")
    if read.usage is not None:
        chosen = max(asked.get("n") or 1, asked.get("best_of") or 1)
        tokens = read.usage["completion_tokens"]
        if isinstance(most, int) and tokens > most * chosen * many:
            return f"{tokens} tokens, {most} at most for each choice"
        spoken = read.usage["speculation"]
        if spoken["accepted"] > spoken["drafted"]:
            return f"more accepted than drafted: {spoken}"
    return ""


def same(one: Read, other: Read) -> str:
    """How two answers to one body differ; "" where they do not."""
    for at, (left, right) in enumerate(zip(one.choices, other.choices, strict=True)):
        if (left.text, left.finish_reason) != (right.text, right.finish_reason):
            return f"choice {at}: {left.text!r} ({left.finish_reason}), expected {right.text!r} ({right.finish_reason})"
        if left.logprobs != right.logprobs:
            return f"choice {at}: other log-probabilities: {left.logprobs[:5]}, expected {right.logprobs[:5]}"
    return ""

"""Tool calls in an answer's text, as the model's chat template taught the model to write them.

============ ============================================================== =======================================
family       how a call is written                                          known by, in the chat template
============ ============================================================== =======================================
hermes       ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``   ``<tool_call>`` (Hermes, Qwen)
mistral      the token ``[TOOL_CALLS]``, then a JSON list of such objects   ``[TOOL_CALLS]``
llama3       ``{"name": ..., "parameters": {...}}``, alone, joined by ``;`` ``"parameters"`` and ``<|start_header_id|>``
============ ============================================================== =======================================

What names no function that the request offered is not a call and stays text.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace.models.base import ChatTokenizer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_NAMES = string.ascii_letters + string.digits
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Call:
    """One call. ``arguments`` is JSON in a text."""

    name: str
    arguments: str
    id: str

    def shown(self) -> dict[str, Any]:
        """As it stands in an answer."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def family_of(template: str) -> str | None:
    """The family of a chat template; None for one that shows no tools, or that no parser here knows."""
    if "tools" not in template:
        return None
    if _OPEN in template:
        return "hermes"
    if _MISTRAL in template:
        return "mistral"
    if "<|start_header_id|>" in template and "parameters" in template:
        return "llama3"
    return None


@dataclass(slots=True)
class ToolParser:
    """Divides one answer into content and calls while it is written. ``names``: of the functions offered.

    ``parallel``: whether there may be several calls; otherwise the answer ends with the first.
    """

    family: str
    names: Collection[str]
    tokenizer: ChatTokenizer
    parallel: bool = True
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    _shown: int = 0
    _marker: int | None = None
    """Where Mistral's marker is among the tokens."""

    def push(self, text: str, tokens: Seq[int]) -> str:
        """More of the answer. Returns the content that it releases: what cannot belong to a call."""
        if self.family == "mistral" and self._marker is None:
            at = next((at for at, one in enumerate(tokens) if self.tokenizer.token_text(one) == _MISTRAL), None)
            self._marker = None if at is None else len(self.tokens) + at
        self.text += text
        self.tokens += tokens
        before = self._content()
        if len(before) <= self._shown:
            return ""
        released, self._shown = before[self._shown :], len(before)
        return released

    def finish(self) -> tuple[str, list[Call]]:
        """The content that was still held back, and the calls."""
        content, calls = self.divided()
        return content[self._shown :], calls

    def divided(self) -> tuple[str, list[Call]]:
        """The content without calls, and the calls; the whole text as content where there is no valid call."""
        calls: list[tuple[str, str]] = []
        content = self.text
        match self.family:
            case "hermes":
                calls, content = _hermes(self.text, self.names)
            case "mistral":
                if (before := self._before_marker()) is not None:
                    assert self._marker is not None
                    rest = self.tokenizer.decode(self.tokens[self._marker + 1 :])
                    calls, content = _objects(rest, self.names, ","), before
            case _:
                calls, content = _objects(self.text, self.names, ";"), ""
        if not calls:
            return self.text, []
        if not self.parallel:
            calls = calls[:1]
        short = self.family == "mistral"
        return content, [Call(name, arguments, _call_id(short)) for name, arguments in calls]

    def _content(self) -> str:
        """What may be shown already."""
        match self.family:
            case "hermes":
                at = self.text.find(_OPEN)
                shown = self.text[: at if at >= 0 else len(self.text) - _begun(self.text, _OPEN)]
                return shown if at < 0 else shown.rstrip()
            case "mistral":
                before = self._before_marker()
                return self.text if before is None else before
            case _:
                return "" if self.text.lstrip()[:1] in ("", "{") else self.text

    def _before_marker(self) -> str | None:
        return None if self._marker is None else self.tokenizer.decode(self.tokens[: self._marker])


def _hermes(text: str, names: Collection[str]) -> tuple[list[tuple[str, str]], str]:
    calls: list[tuple[str, str]] = []
    content: list[str] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        found = _object(text, start + len(_OPEN), names)
        if found is None:
            content.append(text[at : start + len(_OPEN)])
            at = start + len(_OPEN)
            continue
        content.append(text[at:start])
        calls.append(found[0])
        at = found[1]
        rest = text[at:]
        if rest.lstrip().startswith(_CLOSE):
            at += rest.index(_CLOSE) + len(_CLOSE)
    content.append(text[at:])
    return calls, "".join(content).rstrip() if calls else text


def _objects(text: str, names: Collection[str], between: str) -> list[tuple[str, str]]:
    """The calls of a text that consists of calls and of nothing else; none where it holds something else."""
    calls: list[tuple[str, str]] = []
    rest = text.strip()
    if between == "," and rest.startswith("["):
        rest = rest[1:].rstrip().removesuffix("]")
    at = 0
    while rest[at:].strip():
        found = _object(rest, at, names)
        if found is None:
            return []
        calls.append(found[0])
        at = found[1]
        following = rest[at:].lstrip()
        if following and not following.startswith(between):
            return []
        at = len(rest) - len(following[1:])
    return calls


def _object(text: str, at: int, names: Collection[str]) -> tuple[tuple[str, str], int] | None:
    """The call that stands at ``at``, and where it ends; None where there is none."""
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        found, end = _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("name") not in names:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return (found["name"], arguments), end


def _begun(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` begin ``marker``."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _call_id(short: bool) -> str:
    """An id as OpenAI writes it; Mistral's templates demand nine letters and digits."""
    if short:
        return "".join(secrets.choice(_NAMES) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"

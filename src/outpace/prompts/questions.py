"""Prompts for the bench: the embedded set, Spec-Bench's question file, JSONL, or plain text.

>>> [prompt.category for prompt in load_prompts(limit=3)]
['chat', 'translation', 'summarisation']

The embedded set (``data/*.jsonl``, written for outpace) has six prompts in each of seven groups: chat, translation,
summarisation, qa, math, rag and code-editing. Questions in Spec-Bench's format keep these names where the task is the
same: its eight MT-bench categories are ``chat``, ``summarization`` is ``summarisation`` and ``math_reasoning`` is
``math``. Every JSON format may name any category of its own; without one it is ``other``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput

GROUPS = ("chat", "translation", "summarisation", "qa", "math", "rag", "code-editing")
"""The groups of the embedded set, in the order in which tables list them."""
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SPEC_BENCH = {
    **dict.fromkeys(_MT_BENCH, "chat"),
    "mt_bench": "chat",
    "summarization": "summarisation",
    "math_reasoning": "math",
}
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says, turn by turn. ``history`` are the messages that precede the first turn."""

    id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()
    """(role, content) pairs: a system message, or earlier turns with their given answers."""


def load_prompts(path: str | Path | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, or the embedded set. ``limit`` keeps that many, taken from all categories in turn.

    Raises BadInput for a file that cannot be read, holds nothing, or has a bad line (which it names).
    """
    if limit is not None and limit < 1:
        raise BadInput(f"the limit on prompts must be at least 1, not {limit}")
    prompts = _embedded() if path is None else _from_file(Path(path))
    return prompts if limit is None else stratified(prompts, limit)


def stratified(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The first prompt of every category, then the second of every category, and so on: at most ``limit``."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    rounds = range(max(map(len, groups.values()), default=0))
    return [group[i] for i in rounds for group in groups.values() if i < len(group)][:limit]


def unique(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts with ids of their own: records are kept by id."""
    seen: dict[str, int] = defaultdict(int)
    named = []
    for prompt in prompts:
        seen[prompt.id] += 1
        named.append(prompt if seen[prompt.id] == 1 else replace(prompt, id=f"{prompt.id}#{seen[prompt.id]}"))
    return named


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Batches of one category where possible, categories in turn, so that a bench cut short has seen them all."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    line = [prompt for group in groups.values() for prompt in group]
    cut: dict[str, list[list[Prompt]]] = {}
    for begin in range(0, len(line), size):
        cut.setdefault(line[begin].category, []).append(line[begin : begin + size])
    return [batch for turn in zip_longest(*cut.values()) for batch in turn if batch is not None]


def _embedded() -> list[Prompt]:
    folder = resources.files("outpace.prompts") / "data"
    found: list[Prompt] = []
    for group in GROUPS:
        text = (folder / f"{group}.jsonl").read_text(encoding="utf-8")
        found.extend(_parse_jsonl(text, f"{group}.jsonl"))
    return found


def _from_file(path: Path) -> list[Prompt]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {line}: not UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"cannot read prompts from {path}: {error.strerror or error}") from None
    prompts = _parse_jsonl(text, str(path)) if _looks_like_json(path, text) else _parse_text(text)
    if not prompts:
        raise BadInput(f"{path} holds no prompts")
    return prompts


def _looks_like_json(path: Path, text: str) -> bool:
    """By extension; by the first line's first character where the extension says nothing."""
    if path.suffix.lower() in {".jsonl", ".ndjson", ".json"}:
        return True
    return path.suffix.lower() not in {".txt", ".text", ".md"} and text.lstrip().startswith("{")


def _parse_text(text: str) -> list[Prompt]:
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    return [Prompt(f"line-{number}", OTHER, (line,)) for number, line in lines if line]


def _parse_jsonl(text: str, source: str) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold U+2028
        if not line.strip():
            continue
        try:
            prompts.append(_parse_entry(json.loads(line), number))
        except json.JSONDecodeError as error:
            raise BadInput(f"{source}, line {number}: not valid JSON ({error.msg} at column {error.colno})") from None
        except (RecursionError, ValueError) as error:
            raise BadInput(f"{source}, line {number}: {error}") from None
    return prompts


def _parse_entry(entry: Any, number: int) -> Prompt:
    """One line's object as a Prompt. Raises ValueError saying what is wrong with it."""
    if not isinstance(entry, dict):
        raise ValueError(f'expected an object such as {{"prompt": "..."}}, found {_kind(entry)}')  # noqa: TRY004
    category = entry.get("category") or OTHER
    if not isinstance(category, str):
        raise ValueError(f"'category' must be text, found {_kind(category)}")  # noqa: TRY004
    if "question_id" in entry:
        category = _SPEC_BENCH.get(category, category)
    name = str(entry.get("question_id", entry.get("id", f"line-{number}")))
    if "turns" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("'turns' must be a list with at least one text")
        return Prompt(name, category, tuple(_text(turn, "turns") for turn in turns))
    if "messages" in entry:
        return _conversation(name, category, entry["messages"])
    for key in ("prompt", "text"):
        if key in entry:
            return Prompt(name, category, (_text(entry[key], key),))
    raise ValueError("expected one of the keys 'prompt', 'text', 'messages' or 'turns'")


def _conversation(name: str, category: str, messages: Any) -> Prompt:
    """Messages up to the last user message. User turns without a given answer in between are answered in the bench."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' must be a list with at least one message")
    said: list[tuple[str, str]] = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in {"system", "user", "assistant"}:
            raise ValueError("a message needs a 'role' (system, user or assistant) and a 'content'")
        said.append((role, _text(message.get("content"), "content")))
    while said and said[-1][0] == "assistant":  # the bench writes the last answer itself
        said.pop()
    turns: list[str] = []
    while said and said[-1][0] == "user":
        turns.insert(0, said.pop()[1])
    if not turns:
        raise ValueError("'messages' must hold a message of the user after which an answer is due")
    return Prompt(name, category, tuple(turns), tuple(said))


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"'{key}' must be text, found {_kind(value)}")  # noqa: TRY004
    if not value.strip():
        raise ValueError(f"'{key}' is empty")
    return value


def _kind(value: Any) -> str:
    return {
        type(None): "nothing", bool: "true or false", int: "a number", float: "a number", str: "a text",
        list: "a list", dict: "an object",
    }[type(value)]  # fmt: skip

"""The reader of prompt files, for bench, certification and training: JSON lines, a JSON array, or plain text.

A file format is one function of this file: it takes a path and yields rows, each with the name of its place in the
file; :data:`FORMATS` says which endings it is for. Which columns of a row hold a prompt is the same for all formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from outpace.constraints.grammar import Grammar
from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.core.text import check_text
from outpace.prompts.prompt import OTHER, Prompt
from outpace.prompts.task import Task, task_of

COLUMNS = ("turns", "messages", "conversations", "conversation", "prompt", "question", "instruction", "query", "text")
"""Columns that may hold a prompt: a text, a list of texts or a list of messages. The first that a row has counts."""
WANTED = f"one of {', '.join(COLUMNS)} must hold text, a list of texts or a list of messages"
_NAMES = ("question_id", "id", "task_id")
_ROLES = {"human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_OTHER_NAMES = {"mt_bench": "chat", "summarization": "summarisation", "math_reasoning": "math"}
_SPEC_BENCH = dict.fromkeys(_MT_BENCH, "chat") | _OTHER_NAMES
Rows = Iterator[tuple[int, Any]]
"""A number (the line, counted from 1; in an array the entry) and what stands there."""


def read_prompts(path: Path, *, strict: bool = True) -> dict[int, Prompt]:
    """The prompts of a file, by the number of their line, or of their entry in a JSON array, both counted from 1.

    ``strict``: a row without a usable prompt is an error that names its line; otherwise it is passed over. Raises
    BadInput for a file that cannot be read, is broken, or holds no prompt.
    """
    rows = read_rows(path, "prompts")
    found: dict[int, Prompt] = {}
    for number, row in rows:
        try:
            found[number] = prompt_of(row, number, strict=strict)
        except ValueError as error:
            if strict:
                raise BadInput(f"{path}, line {number}: {error}") from None
    if not rows:
        raise BadInput(f"{path} holds no prompts")
    if not found:
        columns = next((", ".join(map(str, row)) for _, row in rows if isinstance(row, Mapping)), "none")
        raise BadInput(f"{path} has no usable rows: its columns are {columns}; {WANTED}")
    return found


def read_rows(path: Path, what: str) -> list[tuple[int, Any]]:
    """The rows of a file by their numbers, whatever they hold. ``what``: it is read for, in words.

    Raises BadInput for a file that cannot be read or is broken.
    """
    try:
        return list(FORMATS.get(path.suffix.lower(), _by_content)(path))
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {line}: not UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"cannot read {what} from {path}: {error.strerror or error}") from None


def _lines(path: Path) -> list[tuple[int, str]]:
    # Not splitlines: JSON strings may hold U+2028.
    lines = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


def _json_rows(path: Path) -> Rows:
    """An object a line, or one array of objects."""
    lines = _lines(path)
    if lines and lines[0][1].startswith("["):
        yield from enumerate(_parsed(path, 1, path.read_text(encoding="utf-8-sig")), 1)
        return
    for number, line in lines:
        yield number, _parsed(path, number, line)


def _text_rows(path: Path) -> Rows:
    """A prompt a line; a file whose first line is a JSON object holds JSON lines whatever its name."""
    lines = _lines(path)
    if lines and _is_object(lines[0][1]):
        yield from _json_rows(path)
        return
    for number, line in lines:
        yield number, {"prompt": line}


def _by_content(path: Path) -> Rows:
    lines = _lines(path)
    return _json_rows(path) if lines and lines[0][1].startswith("{") else _text_rows(path)


FORMATS: dict[str, Callable[[Path], Rows]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _json_rows),
    **dict.fromkeys((".txt", ".text", ".md"), _text_rows),
}
"""Formats by the ending of a file's name; the content decides where the ending says nothing."""


def _parsed(path: Path, line: int, text: str) -> Any:
    """The JSON value that begins on this line."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        where = f"{path}, line {line + error.lineno - 1}"
        raise BadInput(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    except ValueError as error:
        raise BadInput(f"{path}, line {line}: not valid JSON ({error})") from None


def _is_object(line: str) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def prompt_of(row: Any, number: int, *, strict: bool = True) -> Prompt:
    """The prompt of a row, by its columns. Raises ValueError saying what is wrong with it.

    ``strict``: every message must have content and a known role, a category must be text, and a row that is no object
    is refused. Otherwise such messages and categories are passed over, and a bare text is a prompt.
    """
    if isinstance(row, str) and not strict:
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise ValueError(f'expected an object such as {{"prompt": "..."}}, found {_kind(row)}')  # noqa: TRY004
    category = row.get("category") or OTHER
    if not isinstance(category, str):
        if strict:
            raise ValueError(f"'category' must be text, found {_kind(category)}")
        category = OTHER
    if "question_id" in row:
        category = _SPEC_BENCH.get(category, category)
    category = _printable(category)
    name = _printable(str(next((row[key] for key in _NAMES if key in row), f"line-{number}")))
    wrong: list[ValueError] = []
    for column in COLUMNS:
        if column in row:
            try:
                history, turns = _said(row, column, strict)
            except ValueError as error:
                wrong.append(error)
            else:
                grammar = _grammar(row) if strict else None
                return Prompt(name, category, turns, history, _task(row, turns[-1], strict), grammar)
    raise wrong[0] if wrong else ValueError(f"expected one of the keys {', '.join(map(repr, COLUMNS))}")


def _task(row: Mapping[str, Any], prompt: str, strict: bool) -> Task | None:
    """What the answer can be scored by. Raises ValueError for a broken one where ``strict``."""
    try:
        return task_of(row, prompt)
    except ValueError:
        if strict:
            raise
        return None


def _grammar(row: Mapping[str, Any]) -> Grammar | None:
    """What the answers must look like: ``schema``, a JSON schema; or ``grammar``, a Lark grammar, or an object with one
    of ``regex``, ``choices`` and ``lark``."""
    schema, grammar = row.get("schema"), row.get("grammar")
    if schema is not None and grammar is not None:
        raise ValueError("'schema' and 'grammar' contradict each other; give one of them")
    try:
        if schema is not None:
            return Grammar.schema(schema)
        if not isinstance(grammar, Mapping):
            return None if grammar is None else Grammar.lark(grammar)
        makers = {"regex": Grammar.regex, "choices": Grammar.choice, "lark": Grammar.lark}
        if len(grammar) != 1 or next(iter(grammar)) not in makers:
            raise ValueError("'grammar' must be a Lark grammar, or an object with one of regex, choices and lark")
        [(kind, given)] = grammar.items()
        return makers[kind](given)
    except BadInput as error:
        raise ValueError(f"{'schema' if schema is not None else 'grammar'}: {error}") from None


def _said(row: Mapping[str, Any], column: str, strict: bool) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """What a column holds: (role, content) pairs up to the last answer, and the user's turns after it."""
    value = row[column]
    if not isinstance(value, list):
        text = _text(value, column)
        # The instructions of the Alpaca family come with their material in a column of its own.
        more = row.get("input") if column == "instruction" else None
        if isinstance(more, str) and more.strip():
            text = f"{text}\n\n{_text(more, 'input')}"
        return (), (text,)
    messages = [_message(one, column, strict) for one in value]
    said = [one for one in messages if one is not None]
    while said and said[-1][0] in (("assistant",) if strict else ("assistant", "system")):
        said.pop()  # the model is to write the last answer itself
    start = len(said)
    while start and said[start - 1][0] == "user":
        start -= 1
    if start == len(said):
        raise ValueError(f"'{column}' must hold a message of the user after which an answer is due")
    return tuple(said[:start]), tuple(content for _, content in said[start:])


def _message(message: Any, column: str, strict: bool) -> tuple[str, str] | None:
    """(role, content) of a message, a bare text being the user's; None for one to be passed over."""
    role, content = "user", message
    if isinstance(message, Mapping):
        role = str(message.get("role") or message.get("from") or "")
        role = _ROLES.get(role, role)
        content = message.get("content") or message.get("value") or ""
    known = role in {"system", "user", "assistant"}
    if strict and not known:
        raise ValueError("a message needs a 'role' (system, user or assistant) and a 'content'")
    if strict or not isinstance(content, str) or content.strip():
        _text(content, "content" if isinstance(message, Mapping) else column)
    return (role, content) if known and content.strip() else None


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"'{key}' must be text, found {_kind(value)}")  # noqa: TRY004
    if not value.strip():
        raise ValueError(f"'{key}' is empty")
    try:
        check_text(value, f"'{key}'")
    except BadInput as error:
        raise ValueError(str(error)) from None
    return value


def _printable(name: str) -> str:
    """A name for reports; half of a surrogate pair becomes a question mark."""
    return name.encode("utf-8", "replace").decode()


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    names = {type(None): "nothing", bool: "true or false", int: "a number", float: "a number", str: "a text"}
    return names.get(type(value), "a list" if isinstance(value, list) else type(value).__name__)

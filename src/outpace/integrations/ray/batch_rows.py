"""The rows of an offline batch: one JSON object a line, checked before anything runs.

A row has ``prompt`` (a text) or ``messages`` (a conversation), and may have ``id`` (a text or a number; otherwise its
line's number) and settings of its own in place of the command's: ``max_new_tokens``, ``temperature``, ``top_k``,
``top_p``, ``min_p``, ``seed``, ``stop``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, StrictFloat, StrictInt, StrictStr

from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.core.validation import StrictModel, known_fields, validated
from outpace.models.base import Message

_OWN = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt. ``line``: where it is in the file, from 1; ``options``: what it says of its own answer.

    ``error``: why the line holds no prompt; such a row is not computed, and its result says so.
    """

    line: int
    id: str | int
    prompt: str | list[Message] = ""
    options: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """The row of :meth:`as_dict`."""
        return cls(**values)

    def failed(self, reason: str) -> dict[str, Any]:
        """The result of a row that has no answer."""
        return {"id": self.id, "line": self.line, "error": reason}


class _Message(StrictModel):
    role: StrictStr
    content: StrictStr


class _Fields(StrictModel):
    id: StrictStr | StrictInt | None = None
    prompt: StrictStr | None = None
    messages: list[_Message] | None = None
    max_new_tokens: StrictInt | None = Field(default=None, ge=1)
    temperature: StrictFloat | StrictInt | None = Field(default=None, ge=0)
    top_k: StrictInt | None = Field(default=None, ge=0)
    top_p: StrictFloat | StrictInt | None = Field(default=None, gt=0, le=1)
    min_p: StrictFloat | StrictInt | None = Field(default=None, ge=0, le=1)
    seed: StrictInt | None = Field(default=None, ge=0)
    stop: StrictStr | list[StrictStr] | None = None


def read_rows(path: Path) -> list[Row]:
    """All rows of a file, those without a prompt included. Raises BadInput for a file that cannot be read
    or is empty."""
    rows: list[Row] = []
    seen: dict[str | int, int] = {}
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                row = _row(line, raw)
                if row.id in seen and row.error is None:
                    row = Row(line, row.id, error=f"the id {row.id!r} is also that of line {seen[row.id]}")
                seen.setdefault(row.id, line)
                rows.append(row)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    if not rows:
        raise BadInput(f'{path} has no rows; write a line such as {{"id": "a", "prompt": "Why is the sky blue?"}}')
    return rows


def _row(line: int, raw: bytes) -> Row:
    found: Any = None
    try:
        found = parse_json(raw.decode("utf-8"))
        if not isinstance(found, dict):
            raise BadInput("the line is no JSON object")  # noqa: TRY301 - one place turns reasons into rows
        fields = validated(_Fields, found, lambda key, reason: BadInput(f"'{key}': {reason}{_hint(key)}"))
        if (fields.prompt is None) == (fields.messages is None):
            raise BadInput("give either 'prompt' or 'messages'")  # noqa: TRY301
        prompt: str | list[Message]
        if fields.messages is None:
            prompt = fields.prompt or ""
        else:
            prompt = [{"role": one.role, "content": one.content} for one in fields.messages]
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise BadInput("the prompt is empty")  # noqa: TRY301
    except UnicodeDecodeError as error:
        return Row(line, line, error=f"the line is not UTF-8 text (byte {error.start})")
    except ValueError as error:
        return Row(line, line, error=f"the line is not valid JSON: {error}")
    except BadInput as error:
        return Row(line, _id_of(found, line), error=str(error))
    options = {name: value for name in _OWN if (value := getattr(fields, name)) is not None}
    return Row(line, line if fields.id is None else fields.id, prompt, options)


def _id_of(found: Any, line: int) -> str | int:
    """The id of a row that is refused, as far as it has one."""
    given = found.get("id") if isinstance(found, dict) else None
    return given if isinstance(given, str | int) and not isinstance(given, bool) else line


def _hint(key: str) -> str:
    return "" if key.partition(".")[0] in _Fields.model_fields else f"; a row may have: {known_fields(_Fields)}"

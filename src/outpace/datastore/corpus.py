"""From files to token ids: the documents of a datastore, read and tokenised in batches."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.files import home_expanded, parse_json
from outpace.core.text import Encoder, encoded

FIELDS = ("text", "prompt", "turns", "messages")
_PIECE = 1 << 15
"""Characters: longer texts are tokenised in parts, cut at ends of lines."""
_BATCH = 1 << 20
"""Characters that are tokenised at once."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A document or a part of one, ``begins`` the first. ``read`` of ``size`` bytes of all files are read so far."""

    text: str
    begins: bool
    read: int
    size: int


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A :class:`TextPiece` in token ids."""

    tokens: Seq[int]
    begins: bool
    read: int = 0
    size: int = 0


def read_corpus(files: Seq[str | os.PathLike[str]]) -> Iterator[TextPiece]:
    """The texts of files: UTF-8 text, one document a file; ``.jsonl``, one or more documents a line.

    A line of JSON is an object with "text" or "prompt" (a text), "turns" (texts, a document each) or "messages"
    (objects with "content", a document each). Raises BadInput for a file that cannot be read as such.
    """
    paths = [home_expanded(file) for file in files]
    for path in paths:
        if path.is_dir():
            raise BadInput(f"'{path}' is a folder; name the files in it")
        if not path.is_file():
            raise BadInput(f"there is no file '{path}'; name files of text or .jsonl")
    size = sum(path.stat().st_size for path in paths)
    before = 0
    for path in paths:
        try:
            with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
                parts = _lines(path, file) if path.suffix.lower() == ".jsonl" else _whole(file)
                for text, begins in parts:
                    yield TextPiece(text, begins, before + raw.tell(), size)
        except UnicodeDecodeError:
            raise BadInput(f"'{path}' is not UTF-8 text; convert it, or name another file") from None
        except OSError as error:
            raise BadInput(f"cannot read '{path}': {error.strerror or error}") from None
        before += path.stat().st_size


def tokenise(pieces: Iterable[TextPiece], tokenizer: Encoder) -> Iterator[TokenPiece]:
    """Pieces of text as token ids, a batch of about a million characters at a time."""
    batch: list[TextPiece] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece.text)
        if held >= _BATCH:
            yield from _encoded(batch, tokenizer)
            batch, held = [], 0
    yield from _encoded(batch, tokenizer)


def _encoded(batch: list[TextPiece], tokenizer: Encoder) -> Iterator[TokenPiece]:
    for piece, tokens in zip(batch, encoded(tokenizer, [piece.text for piece in batch]), strict=True):
        yield TokenPiece(tokens, piece.begins, piece.read, piece.size)


def _whole(file: Any) -> Iterator[tuple[str, bool]]:
    """One document in pieces that end at the end of a line, or of a word where lines are too long."""
    held, begins = "", True
    while block := file.read(_PIECE):
        held += block
        while len(held) >= _PIECE:
            cut = _cut(held)
            yield held[:cut], begins
            held, begins = held[cut:], False
    if held:
        yield held, begins


def _cut(text: str) -> int:
    """Where to cut a longer text: after the last line within ``_PIECE`` characters, else before the last word."""
    line = text.rfind("\n", 0, _PIECE) + 1
    word = text.rfind(" ", 1, _PIECE)
    return line or (word if word > 0 else _PIECE)


def _lines(path: Path, file: Any) -> Iterator[tuple[str, bool]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        for text in _texts(line, f"'{path}', line {number}"):
            held, begins = text, True
            while len(held) > _PIECE:
                cut = _cut(held)
                yield held[:cut], begins
                held, begins = held[cut:], False
            if held:
                yield held, begins


def _texts(line: str, where: str) -> Iterator[str]:
    """The texts of one line of JSON."""
    try:
        row = parse_json(line)
    except ValueError:
        raise BadInput(f"{where} is not JSON") from None
    if not isinstance(row, dict) or not any(field in row for field in FIELDS):
        raise BadInput(f"{where}: expected an object with one of: {', '.join(FIELDS)}")
    for field in FIELDS:
        values = row.get(field, [])
        for value in values if isinstance(values, list) else [values]:
            text = value.get("content", "") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise BadInput(f'{where}: "{field}" must hold text')
            yield text.encode("utf-8", "replace").decode()  # a half of a surrogate pair is no text

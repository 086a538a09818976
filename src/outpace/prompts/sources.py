"""Where prompts come from: files and data sets of the hub. The model itself is in ``self_written.py``.

Files hold JSON lines, each with a column of prompts (``COLUMNS``), or a prompt a line.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput, MissingExtra
from outpace.prompts.overlap import normal

COLUMNS = ("turns", "messages", "conversations", "conversation", "prompt", "question", "instruction", "query", "text")
"""Columns that may hold prompts, the first that a row has counts."""
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "prompter": "user"}
_JSON = {".jsonl", ".ndjson", ".json"}
_HUB = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?(:[^:\s]*){0,2}")
_SHUFFLED = 10_000
"""Rows of a hub data set that are shuffled together while it streams in."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file or a data set. ``texts``: what users say in it; ``system``: the message before, if any."""

    number: int
    texts: tuple[str, ...]
    system: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt to be answered. ``origin``: where it comes from, for good. ``key``: told from the text alone."""

    origin: str
    text: str
    system: str = ""

    @property
    def key(self) -> str:
        """The same for the same words, wherever they come from: so the held-out split is the same too."""
        return hashlib.sha256(f"{normal(self.system)}\0{normal(self.text)}".encode()).hexdigest()[:24]

    @property
    def messages(self) -> list[dict[str, str]]:
        """As a chat template takes them."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, {"role": "user", "content": self.text}]


class Source:
    """Prompts by name, one after the other; where there is no end, iteration has none."""

    name: str

    def __iter__(self) -> Iterator[Ask]:
        raise NotImplementedError


class Given(Source):
    """The prompts of a file, in an order that ``seed`` says. Of a row with several turns the first is taken."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.name = path.name
        self._rows = read_rows(path)
        random.Random(seed).shuffle(self._rows)

    def __iter__(self) -> Iterator[Ask]:
        for row in self._rows:
            yield Ask(f"{self.name}:{row.number}", row.texts[0], row.system)


class Hub(Source):
    """A data set of the hub, ``NAME[:CONFIG[:SPLIT]]``, streamed. Needs the extra ``train``."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name, self._seed = name, seed
        self._rows = self._opened()

    def _opened(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise MissingExtra(f"'{self.name}' is no file here; reading it as a data set of the hub", "train") from None
        from outpace.models.quiet import one_line

        repository, config, split = [*self.name.split(":"), "", ""][:3]
        try:
            datasets.disable_progress_bars()
            if not split:
                splits = datasets.get_dataset_split_names(repository, config or None)
                split = next((one for one in splits if str(one).startswith("train")), splits[0])
            found = datasets.load_dataset(repository, config or None, split=split, streaming=True)
            return found.shuffle(seed=self._seed, buffer_size=_SHUFFLED)
        except Exception as error:  # the library's own errors, those of the network, and what data sets raise
            raise BadInput(
                f"there is no file '{self.name}', and as a data set of the hub it cannot be read: {one_line(error)}"
            ) from error

    def __iter__(self) -> Iterator[Ask]:
        from outpace.models.quiet import one_line

        usable, number, columns = 0, 0, ""
        rows = iter(self._rows)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # the network, in the middle of it
                raise BadInput(
                    f"data set '{self.name}' ended after {number} rows: {one_line(error)}; the same command goes on"
                ) from error
            if row is None:
                break
            number += 1
            columns = columns or ", ".join(map(str, row))
            if found := row_of(row, number):
                usable += 1
                yield Ask(f"{self.name}:{number}", found.texts[0], found.system)
            elif not usable and number >= _SHUFFLED:
                break
        if not usable:
            raise BadInput(
                f"data set '{self.name}' has no usable rows: its columns are {columns or 'none'}; {_wanted()}"
            )


def source(name: str, seed: int = 0) -> Source:
    """The prompts that a person named: a file, or a data set of the hub. Raises BadInput for what is neither."""
    path = Path(name).expanduser()
    if path.exists() or path.suffix.lower() in {*_JSON, ".txt", ".md"} or not _HUB.fullmatch(name):
        return Given(path, seed)
    return Hub(name, seed)


def read_rows(path: Path) -> list[Row]:
    """The usable rows of a file. Raises BadInput for one that cannot be read, has a broken line or no usable row."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {line}: not UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"cannot read prompts from {path}: {error.strerror or error}") from None
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise BadInput(f"{path} holds no prompts")
    if path.suffix.lower() not in _JSON and not lines[0][1].startswith("{"):
        return [Row(number, (line,)) for number, line in lines]
    rows, columns = [], ""
    for number, entry in _entries(path, text, lines):
        columns = columns or (", ".join(map(str, entry)) if isinstance(entry, dict) else "")
        if found := row_of(entry, number):
            rows.append(found)
    if not rows:
        raise BadInput(f"{path} has no usable rows: its columns are {columns or 'none'}; {_wanted()}")
    return rows


def _entries(path: Path, text: str, lines: Sequence[tuple[int, str]]) -> Iterable[tuple[int, Any]]:
    """The objects of JSON lines, or of one JSON array."""
    try:
        if lines[0][1].startswith("["):
            whole = json.loads(text)
            return list(enumerate(whole, 1)) if isinstance(whole, list) else []
    except ValueError as error:
        raise BadInput(f"{path} is not valid JSON ({error})") from None
    found = []
    for number, line in lines:
        try:
            found.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}, line {number}: not valid JSON ({error})") from None
    return found


def _wanted() -> str:
    return f"one of {', '.join(COLUMNS)} must hold text, a list of texts or a list of messages"


def row_of(entry: Any, number: int) -> Row | None:
    """What users say in a row, by its columns. None for a row that holds nothing of the kind."""
    if isinstance(entry, str):
        return Row(number, (entry,)) if entry.strip() else None
    if not isinstance(entry, Mapping):
        return None
    for column in COLUMNS:
        value = entry.get(column)
        if isinstance(value, str) and value.strip():
            # The instructions of the Alpaca family come with their material in a column of its own.
            more = entry.get("input") if column == "instruction" else None
            whole = f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
            return Row(number, (whole,))
        if isinstance(value, list) and (found := _conversation(value, number)):
            return found
    return None


def _conversation(messages: Sequence[Any], number: int) -> Row | None:
    said: list[str] = []
    system = ""
    for message in messages:
        if isinstance(message, str):
            role, content = "user", message
        elif isinstance(message, Mapping):
            role = str(message.get("role") or message.get("from") or "")
            content = message.get("content") or message.get("value") or ""
        else:
            return None
        role = _ROLES.get(role, role)
        if not isinstance(content, str):
            return None
        if role == "system" and not said:
            system = content
        elif role == "user" and content.strip():
            said.append(content)
    return Row(number, tuple(said), system) if said else None


def seed_of(text: str) -> int:
    """A seed that the text alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 2**31


@dataclass(frozen=True, slots=True)
class Variation:
    """How answers are drawn: a ``share`` at ``temperature``, the others greedily. A key says how, and the seed."""

    share: float = 0.3
    temperature: float = 0.8

    def of(self, key: str) -> tuple[float, int]:
        """Temperature and seed for the prompt of this key."""
        draw = seed_of(f"{key} sampled") / 2**31
        return (self.temperature if draw < self.share else 0.0), seed_of(f"{key} seed")

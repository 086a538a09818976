"""The prompts that were judged for a folder of conversations, in order, in a file that lines are only added to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.prompts.passages import PassagePrompts
from outpace.prompts.prompt import Prompt
from outpace.training.self_written import SelfWritten

LOG = "prompts.jsonl"


class Log:
    """A line for every prompt: to be answered, or why not. A line that a kill cut off is dropped.

    Raises BadInput for a damaged line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prompts: list[Prompt] = []
        """To be answered."""
        self.judged: set[tuple[str, str]] = set()
        """(id, key) of all prompts."""
        self.removed: Counter[str] = Counter()
        """How many prompts were left out, by reason."""
        self.turns = 0
        """Turns that the model was asked to write."""
        self.own = 0
        """Prompts among them that are to be answered."""
        self.passages_judged = 0
        """Prompts about passages."""
        self.passages = 0
        """Those of them that are to be answered."""
        if path.exists():
            self._read()

    def _read(self) -> None:
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._note(parse_json(line))
            except (ValueError, KeyError, TypeError) as error:
                raise BadInput(
                    f"{self.path}, line {number}, is damaged ({error}); delete the line, and run again"
                ) from None
        if len(whole) < len(raw):  # a kill in the middle of a line
            with self.path.open("r+b") as file:
                file.truncate(len(whole))

    def _note(self, entry: dict[str, Any]) -> None:
        if "turns" in entry:
            self.turns = int(entry["turns"])
            return
        self.judged.add((entry["origin"], entry["key"]))
        about_passages = entry["origin"].startswith(f"{PassagePrompts.name}:")
        self.passages_judged += about_passages
        if "removed" in entry:
            self.removed[entry["removed"]] += 1
        else:
            self.prompts.append(Prompt.single(entry["origin"], entry["text"], entry.get("system", "")))
            self.passages += about_passages
            self.own += entry["origin"].startswith(f"{SelfWritten.name}:")

    def write(self, entries: Sequence[dict[str, Any]]) -> None:
        """Add lines. Raises BadInput where they cannot be written."""
        try:
            with self.path.open("ab") as file:
                file.write("".join(json.dumps(entry, ensure_ascii=True) + "\n" for entry in entries).encode())
        except OSError as error:
            raise BadInput(
                f"{self.path} cannot be written ({error.strerror or error}); make room, and run again to go on"
            ) from error
        for entry in entries:
            self._note(entry)

"""The prompts that were looked at for a folder of conversations, in order, in a file that is only ever added to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput
from outpace.prompts.passages import PassagePrompts
from outpace.prompts.sources import Ask
from outpace.training.self_written import SelfWritten

LOG = "prompts.jsonl"


class Log:
    """A line for every prompt: to be answered, or why not. Lines that a kill cut off are forgotten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asks: list[Ask] = []
        self.looked_at: set[tuple[str, str]] = set()
        self.removed: Counter[str] = Counter()
        self.turns = 0
        """Turns that the model was asked for."""
        self.own = 0
        """Prompts of them that are to be answered."""
        self.readings = 0
        """Prompts about texts that were looked at."""
        self.read = 0
        """Those of them that are to be answered."""
        if path.exists():
            self._read()

    def _read(self) -> None:
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._note(json.loads(line))
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
        self.looked_at.add((entry["origin"], entry["key"]))
        reading = entry["origin"].startswith(f"{PassagePrompts.name}:")
        self.readings += reading
        if "removed" in entry:
            self.removed[entry["removed"]] += 1
        else:
            self.asks.append(Ask(entry["origin"], entry["text"], entry.get("system", "")))
            self.read += reading
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

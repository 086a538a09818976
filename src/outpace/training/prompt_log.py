"""The prompts that were judged for a folder of conversations, in order, in a file that lines are only added to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.models.quiet import one_line
from outpace.prompts.passages import PassagePrompts
from outpace.prompts.prompt import Prompt
from outpace.training.self_written import SelfWritten

LOG = "prompts.jsonl"


class _Line(BaseModel):
    """Turns that were written so far; or a prompt by origin and key, and why it was removed, or its texts."""

    model_config = ConfigDict(strict=True)

    turns: Annotated[int, Field(ge=0)] | None = None
    origin: str | None = None
    key: str | None = None
    removed: str | None = None
    text: str | None = None
    later: list[str] = Field(default_factory=list)
    system: str = ""


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
                self._note(_Line.model_validate(parse_json(line)))
            except ValueError as error:  # pydantic's errors are ValueErrors
                raise BadInput(
                    f"{self.path}, line {number}, is damaged ({one_line(error)}); delete the line, and run again"
                ) from None
        if len(whole) < len(raw):  # a kill in the middle of a line
            with self.path.open("r+b") as file:
                file.truncate(len(whole))

    def _note(self, line: _Line) -> None:
        if line.turns is not None:
            self.turns = line.turns
            return
        if line.origin is None or line.key is None or (line.removed is None and line.text is None):
            raise ValueError("it says of no prompt what became of it")
        self.judged.add((line.origin, line.key))
        about_passages = line.origin.startswith(f"{PassagePrompts.name}:")
        self.passages_judged += about_passages
        if line.removed is not None:
            self.removed[line.removed] += 1
        elif line.text is not None:
            self.prompts.append(Prompt.single(line.origin, line.text, line.system, line.later))
            self.passages += about_passages
            self.own += line.origin.startswith(f"{SelfWritten.name}:")

    def write(self, entries: Sequence[dict[str, Any]]) -> None:
        """Add lines. Raises BadInput where they cannot be written."""
        try:
            with self.path.open("ab") as file:
                file.write("".join(json.dumps(entry, ensure_ascii=True) + "\n" for entry in entries).encode())
        except OSError as error:
            raise BadInput(
                f"{self.path} cannot be written ({error.strerror or error}); free some space, and continue with "
                "--resume"
            ) from error
        for entry in entries:
            self._note(_Line.model_validate(entry))

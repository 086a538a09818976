"""Prompt: what users say to a model, wherever it was read or written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from outpace.constraints.grammar import Grammar
from outpace.prompts.overlap import normal
from outpace.prompts.task import Task

OTHER = "other"
"""The category of prompts that name none."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says, turn by turn.

    ``id``: where it comes from, such as ``questions.jsonl:7`` or ``self:12``. ``turns``: what the user says; the model
    answers each before the next. ``history``: (role, content) of the messages before the first turn: a system message,
    or earlier turns with their given answers. ``task``: what the answer to the last turn can be scored by. ``grammar``:
    what the answers must look like.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()
    task: Task | None = None
    grammar: Grammar | None = None

    @classmethod
    def single(cls, name: str, text: str, system: str = "", later: Iterable[str] = ()) -> Prompt:
        """A prompt of one turn, and ``later`` ones, behind a system message where there is one."""
        return cls(name, OTHER, (text, *later), (("system", system),) if system else ())

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]

    @property
    def system(self) -> str:
        """The last system message before the user's first words, or ""."""
        found = ""
        for role, content in self.history:
            if role == "user":
                break
            if role == "system":
                found = content
        return found

    @property
    def messages(self) -> list[dict[str, str]]:
        """The history and the first turn, as chat templates take them."""
        return [{"role": role, "content": content} for role, content in (*self.history, ("user", self.text))]

    @property
    def user_texts(self) -> tuple[str, ...]:
        """All that the user says, in the history and in the turns."""
        return (*(content for role, content in self.history if role == "user"), *self.turns)

    def asked(self, name: str) -> Prompt:
        """The system message and all that the user says, under another id: what training has answered."""
        first, *later = self.user_texts
        return Prompt.single(name, first, self.system, later)

    @property
    def key(self) -> str:
        """24 hexadecimal digits told from the system message and the first turn, up to case and space.

        The same words have the same key wherever they come from, and so belong to the same split of the data.
        """
        return hashlib.sha256(f"{normal(self.system)}\0{normal(self.text)}".encode()).hexdigest()[:24]

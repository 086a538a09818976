"""What the users say: single questions, and conversations of several turns whose answers are the server's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outpace.prompts.questions import load_prompts

TRACES = Path(__file__).with_name("traces.jsonl")
WORKLOADS = ("questions", "traces")


@dataclass(frozen=True, slots=True)
class Conversation:
    """``opening``: messages before the first turn. ``turns``: what the user says, each after an answer."""

    id: str
    category: str
    opening: tuple[dict[str, str], ...]
    turns: tuple[str, ...]


def questions(path: Path | None) -> list[Conversation]:
    """Single questions: the first turns of a prompt file, or of the embedded set. Raises BadInput."""
    return [Conversation(one.id, one.category, tuple(one.messages[:-1]), (one.text,)) for one in load_prompts(path)]


def traces(path: Path = TRACES) -> list[Conversation]:
    """Conversations of several turns: chats, work with tools, edits of code. Raises BadInput."""
    found = []
    for one in load_prompts(path):
        opening = tuple({"role": role, "content": content} for role, content in one.history)
        found.append(Conversation(one.id, one.category, opening, one.turns))
    return found

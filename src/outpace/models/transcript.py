"""A conversation as plain text, for models without a chat template."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.models.base import Message

NEXT_TURN = "\nUser:"
"""Where the user's next turn begins: a model that has no end-of-turn token goes on with it by itself."""


def transcript(messages: Sequence[Message]) -> str:
    """Lines of ``Role: text`` (System, User, Assistant), and ``Assistant:`` for the answer to come.

    An answer that follows the last line is part of the transcript of the next turn as it is, so that its K/V serves
    again.
    """
    lines = [f"{one['role'].capitalize()}:{_spaced(one['content'])}" for one in messages]
    return "\n".join([*lines, "Assistant:"])


def _spaced(text: str) -> str:
    """The text behind a colon; one that was generated there brings its own space."""
    return text if text[:1].isspace() else f" {text}"

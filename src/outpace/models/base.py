"""ChatTokenizer: what outpace needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""


class ChatTokenizer(Protocol):
    """Text to token ids and back, and conversations under the model's chat template."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when they map the same ids to the same token strings."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` has a template of the model's own to write conversations with."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the special tokens the model puts at the beginning of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def token_text(self, token: int) -> str:
        """The text of one token by itself, special tokens shown."""
        ...

    def __hash__(self) -> int: ...

    def __len__(self) -> int:
        """How many ids there are; a model may score more."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that one token adds to a text, or None for special tokens and unused ids."""
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation under the model's chat template, ready for the assistant's answer.

        Without a template: a single message as it is, to be continued; several as a transcript
        (:mod:`outpace.models.transcript`). Raises BadInput for an empty conversation and for one that the template
        refuses (no system role, roles that must alternate).
        """
        ...

"""Model: a target, its tokenizer, and what is known about both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from outpace.errors import BadInput

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule
    from outpace.method import Method
    from outpace.targets.base import Target

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""


class ChatTokenizer(Protocol):
    """What outpace needs of a tokenizer."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when they map the same ids to the same token strings."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the special tokens the model puts at the beginning of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def token_text(self, token: int) -> str:
        """How one token reads by itself, special tokens shown."""
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation under the model's chat template, ready for the assistant's answer.

        A model without a template gets the last message's text, raw.
        """
        ...


@dataclass(slots=True)
class Model:
    """What ``outpace.load`` returns. ``info`` holds architecture, parameters, dtype, device, source and the like."""

    name: str
    target: Target
    tokenizer: ChatTokenizer
    eos_ids: frozenset[int]
    info: dict[str, Any] = field(default_factory=dict)

    def method(
        self,
        name: str | Method,
        settings: Mapping[str, Any] | None = None,
        *,
        rule: str | AcceptanceRule | None = None,
        draft_model: Model | None = None,
    ) -> Method:
        """Build a method for this model. Raises BadInput for what does not exist or does not fit."""
        from outpace.method import Context, Method, build  # imports torch, which naming a model must not wait for

        if isinstance(name, Method):
            return name

        def draft() -> Target:
            if draft_model is None:
                raise BadInput(f"method '{name}' needs a draft model of the same vocabulary: give --draft-model NAME")
            if draft_model.tokenizer.fingerprint != self.tokenizer.fingerprint:
                raise BadInput(
                    f"draft model '{draft_model.name}' has another vocabulary than '{self.name}'; "
                    "choose one that shares its tokenizer"
                )
            return draft_model.target

        return build(name, Context(self.target, draft), settings, rule)

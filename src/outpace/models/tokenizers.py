"""ChatTokenizer on a transformers tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from outpace.errors import BadInput
from outpace.models.base import Message
from outpace.models.quiet import one_line

_SPACE = "▁"  # how SentencePiece writes a space


class HFTokenizer:
    """What outpace needs of a tokenizer, from one of transformers (``inner``)."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._prefix = _prefix(inner)

    def __len__(self) -> int:
        return len(self.inner)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when they map the same ids to the same token strings."""
        digest = hashlib.sha256()
        for token, index in sorted(self.inner.get_vocab().items(), key=lambda pair: (pair[1], pair[0])):
            raw = token.encode("utf-8", "surrogatepass")
            digest.update(b"%d %d " % (index, len(raw)) + raw)
        return digest.hexdigest()

    @property
    def template(self) -> str:
        """The chat template, or "" for a model without one."""
        template = getattr(self.inner, "chat_template", None)
        if isinstance(template, dict):  # several, by use
            template = template.get("default") or next(iter(template.values()), "")
        return template or ""

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the special tokens the model puts at the beginning of a text."""
        return [*self._prefix, *_ids(self.inner, text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def token_text(self, token: int) -> str:
        """How one token reads by itself, special tokens shown."""
        text: str = self.inner.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = self.inner.convert_ids_to_tokens(token) or ""
        if piece.startswith(_SPACE) and not text.startswith(" "):
            return " " + text  # SentencePiece takes the space before the first token of a text away
        return text

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation under the chat template, ready for the assistant's answer.

        A model without a template gets the last message's text, raw. Raises BadInput for an empty conversation and
        for one that the template refuses (no system role, roles that must alternate).
        """
        if not messages:
            raise BadInput("the conversation is empty; give at least one message")
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise BadInput('every message needs a text for "role" and for "content"')
        if not self.template:
            return self.encode(messages[-1]["content"])
        try:
            text = self.inner.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs that come with the model and raise what they like
            roles = ", ".join(message["role"] for message in messages)
            raise BadInput(f"the model's chat template refuses roles ({roles}): {one_line(error)}") from error
        return _ids(self.inner, text)  # the template writes the special tokens itself


def _ids(inner: Any, text: str) -> list[int]:
    # verbose=False: the context's length is checked where it matters, and said in our own words
    ids = inner(text, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
    return [int(token) for token in ids]


def _prefix(inner: Any) -> list[int]:
    """Special tokens before a text; those that some tokenizers put after it would end the text to be continued."""
    probe = "a"
    bare, full = _ids(inner, probe), list(inner(probe, verbose=False)["input_ids"])
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return [int(token) for token in full[:start]]

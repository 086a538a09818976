"""HFTokenizer: the ChatTokenizer of a transformers tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.text import check_text
from outpace.models.quiet import one_line
from outpace.models.transcript import transcript

_SPACE = "▁"  # how SentencePiece writes a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # and a byte that is no character of its own


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others are numbered from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in plain]
    return {chr(value): value for value in plain} | {chr(256 + i): value for i, value in enumerate(others)}


_ALPHABET = _byte_alphabet()
_LATIN = str.maketrans({character: chr(value) for character, value in _ALPHABET.items()})


class HFTokenizer:
    """A :class:`~outpace.models.base.ChatTokenizer` of one of transformers, ``inner``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._prefix = _prefix(inner)
        self._texts: dict[int, str] = {}
        """Of single tokens, as far as they were asked for."""

    def __len__(self) -> int:
        return len(self.inner)

    @cached_property
    def fingerprint(self) -> str:
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

    @property
    def has_chat_template(self) -> bool:
        return bool(self.template)

    def encode(self, text: str) -> list[int]:
        check_text(text, "the text")
        return [*self._prefix, *_ids(self.inner, text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts without special tokens before or after them, on all CPUs where the tokenizer can."""
        if not texts:
            return []
        for text in texts:
            check_text(text, "the text")
        if backend := getattr(self.inner, "backend_tokenizer", None):
            return [one.ids for one in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [_ids(self.inner, text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:  # a stream of text asks for every token by itself, too
            known = self._texts.get(ids[0])
            if known is None:
                known = self._decoded(ids)
                if 0 <= ids[0] < len(self):  # nothing is kept of numbers that are no tokens, of which there is no end
                    self._texts[ids[0]] = known
            return known
        return self._decoded(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def token_text(self, token: int) -> str:
        text: str = self.inner.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = self.inner.convert_ids_to_tokens(token) or ""
        if piece.startswith(_SPACE) and not text.startswith(" "):
            return " " + text  # SentencePiece takes the space before the first token of a text away
        return text

    def token_bytes(self, token: int) -> bytes | None:
        return self._bytes[token] if 0 <= token < len(self._bytes) else None

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        decoders = _decoders(self.inner)
        added = {int(index): entry for index, entry in getattr(self.inner, "added_tokens_decoder", {}).items()}
        special = {int(index) for index in self.inner.all_special_ids}
        size = 1 + max(self.inner.get_vocab().values(), default=-1)
        found: list[bytes | None] = []
        for index, piece in enumerate(self.inner.convert_ids_to_tokens(list(range(size)))):
            if piece is None or index in special or (index in added and added[index].special):
                found.append(None)
            elif index in added:
                found.append(str(added[index].content).encode())
            else:
                found.append(self._ordinary(index, piece, decoders))
        return found

    def _ordinary(self, index: int, piece: str, decoders: set[str]) -> bytes:
        if "ByteLevel" in decoders and _ALPHABET.keys() >= set(piece):
            return piece.translate(_LATIN).encode("latin-1")
        if "ByteFallback" in decoders and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if decoders & {"Metaspace", "ByteFallback", "Replace"}:
            return piece.replace(_SPACE, " ").encode()
        return self.token_text(index).encode()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, answer: str = ""
    ) -> list[int]:
        """As :class:`~outpace.models.base.ChatTokenizer` describes it. ``tools``: functions that the model may call,
        for a template that shows them; a message with ``tool_calls`` may then be without content. ``answer``: the
        beginning of the answer, special tokens as the model writes them."""
        if not messages:
            raise BadInput("the conversation is empty; give at least one message")
        for message in messages:
            content = message.get("content") if not message.get("tool_calls") else message.get("content") or ""
            if not isinstance(message.get("role"), str) or not isinstance(content, str):
                raise BadInput('every message needs a text for "role" and for "content"')
            check_text(content, f"the message of role {message['role']!r}")
        if not self.template:
            return self.encode(messages[0]["content"] if len(messages) == 1 else transcript(messages))
        try:
            text = self.inner.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=False,
                **({"tools": list(tools)} if tools else {}),
            )
        except Exception as error:  # templates are programs that come with the model and raise what they like
            roles = ", ".join(message["role"] for message in messages)
            raise BadInput(f"the model's chat template refuses roles ({roles}): {one_line(error)}") from error
        return _ids(self.inner, text + answer)  # the template writes the special tokens itself


def _ids(inner: Any, text: str) -> list[int]:
    # verbose=False: the context's length is checked elsewhere, with our own message
    ids = inner(text, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
    return [int(token) for token in ids]


def _decoders(inner: Any) -> set[str]:
    """The kinds of decoding steps that turn token strings into text, as the tokenizers library names them."""
    decoder = getattr(getattr(inner, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}


def _prefix(inner: Any) -> list[int]:
    """Special tokens before a text; those that some tokenizers put after it would end the text to be continued."""
    probe = "a"
    bare, full = _ids(inner, probe), list(inner(probe, verbose=False)["input_ids"])
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return [int(token) for token in full[:start]]

"""Tokenizers of a few letters, for toy models: enough to certify methods that go through text."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.models.base import Message

LETTERS = ("a", "b", "ab", "c", "ba")
OTHER_LETTERS = ("b", "ba", "a")
"""The vocabularies of toy targets (the first few of them) and of the toy draft model beside them."""


class Letters:
    """A vocabulary of ``pieces``, a string a token, None for a special one. The longest that fits is read first."""

    def __init__(self, pieces: Seq[str | bytes | None]) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    has_chat_template = False

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def fingerprint(self) -> str:
        return repr(self.pieces)

    def encode(self, text: str) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            fits = [token for token, piece in enumerate(self.pieces) if piece and rest.startswith(piece)]
            best = max(fits, key=lambda token: (len(self.pieces[token] or b""), -token), default=None)
            if best is not None:
                ids.append(best)
            rest = rest[1 if best is None else len(self.pieces[best] or b"") :]
        return ids

    def decode(self, ids: Seq[int]) -> str:
        return b"".join(self.pieces[token] or b"" for token in ids).decode("utf-8", errors="replace")

    def token_text(self, token: int) -> str:
        return f"<{token}>" if self.pieces[token] is None else self.decode([token])

    def token_bytes(self, token: int) -> bytes | None:
        return self.pieces[token] if 0 <= token < len(self.pieces) else None

    def chat(self, messages: Seq[Message]) -> list[int]:
        return self.encode(messages[-1]["content"])

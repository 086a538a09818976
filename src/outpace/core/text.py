"""TextStream: token ids to text as they arrive, in whole characters, up to a stop string; and what counts as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outpace.core.errors import BadInput, said

_REPLACEMENT = "�"  # what a decoder shows for bytes that do not form a character yet


class Tokenizer(Protocol):
    """The part of a tokenizer that decoding needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens left out."""
        ...


class Encoder(Protocol):
    """The part of a tokenizer that makes tokens of raw text; ``encode_batch`` is called instead where it has one."""

    def encode(self, text: str) -> list[int]:
        """Ids of raw text."""
        ...


def encoded(tokenizer: Encoder, texts: Sequence[str]) -> list[list[int]]:
    """Ids of raw texts. ``encode`` may put a token before each, which belongs to none; ``encode_batch`` does not."""
    batch: Callable[[Sequence[str]], list[list[int]]] | None = getattr(tokenizer, "encode_batch", None)
    return [tokenizer.encode(text) for text in texts] if batch is None else batch(texts)


def check_text(text: str, what: str) -> None:
    """Raise BadInput for ``text`` with half of a surrogate pair, which stands for no character; ``what``: its name.

    JSON's ``\\ud800`` makes one, and so do bytes on a command line that are not UTF-8.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise BadInput(
            f"{what} is not valid text: character {error.start + 1} is half of a surrogate pair ({half}); remove it"
        ) from None


class TextStream:
    """Turns tokens into text pieces. Holds back incomplete characters and whatever may begin a stop string.

    Text before a stop string is released; the stop string and what follows it is not. ``shown`` is told every token in
    turn and says whether it is text at all; None: all are.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), shown: Callable[[int], bool] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._stops = tuple(stop for stop in stops if stop)
        self._ids: list[int] = []
        self._window = 0  # decode from here: far enough back that joining rules (spaces) come out right
        self._read = 0  # tokens before this are text already
        self._held = ""
        self.text = ""
        self.stopped: str | None = None
        self.failure: BadInput | None = None
        """What the tokenizer, somebody else's program, could not decode; no text comes after it."""

    def push(self, token: int) -> str:
        """The text that this token releases (maybe ""). Sets ``stopped`` when a stop string is complete."""
        if self._shown is not None and not self._shown(token):
            return ""
        self._ids.append(token)
        before, after = self._decode(self._window, self._read), self._decode(self._window)
        if after.endswith(_REPLACEMENT) or len(after) <= len(before):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """Whatever was held back, at the end of the answer."""
        if self.stopped is not None:
            return ""
        before, after = self._decode(self._window, self._read), self._decode(self._window)
        self._window = self._read = len(self._ids)
        piece = self._release(after[len(before) :])
        self.text += self._held
        piece, self._held = piece + self._held, ""
        return piece

    def _decode(self, start: int, stop: int | None = None) -> str:
        """The text of the ids from ``start`` to ``stop``; none once the tokenizer has failed."""
        if self.failure is not None:
            return ""
        try:
            text = self._tokenizer.decode(self._ids[start:stop])
        except Exception as error:
            self.failure = BadInput(f"the tokenizer cannot decode the answer: it raised {said(error)}")
            self.failure.__cause__ = error
            return ""
        if not isinstance(text, str):
            self.failure = BadInput(f"the tokenizer cannot decode the answer: it returned {type(text).__name__}")
            return ""
        return text

    def _release(self, piece: str) -> str:
        pending = self._held + piece
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if hits:  # the first to be complete, so that the answer does not depend on how tokens split the text
            _, at, self.stopped = min(hits)
            pending, self._held = pending[:at], ""
        else:
            keep = max((_overlap(pending, stop) for stop in self._stops), default=0)
            pending, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += pending
        return pending


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

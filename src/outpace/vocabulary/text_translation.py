"""Translating text: committed target tokens into draft tokens, and the draft model's text into target tokens.

The tokens at the end of a text change as it grows. Here a text's tokens are kept up to the last border that no
tokenizer has a token across, a space after another character; the rest, mostly a word, is encoded again when the text
has grown. So the draft tokens are a function of the committed tokens, whatever rounds they came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq

from outpace.models.base import ChatTokenizer
from outpace.vocabulary.shared import exact

_BORDER = 0x20
_SPACES = frozenset(b" \t\n\r\v\f")
_LONGEST = 256
"""Bytes after which a text without borders is cut all the same, so that reading it stays linear."""
LOOK_BACK = 16
"""Committed tokens that are encoded again together with the draft model's text."""

Encode = Callable[[bytes], list[int]]


def cut(text: bytes) -> list[bytes]:
    """A text at its borders; the last piece is open: what comes next may belong to it."""
    pieces, start = [], 0
    for at in range(1, len(text)):
        border = text[at] == _BORDER and text[at - 1] not in _SPACES
        if border or (at - start >= _LONGEST and text[at] & 0xC0 != 0x80):
            pieces.append(text[start:at])
            start = at
    pieces.append(text[start:])
    return pieces


def whole_characters(text: bytes) -> int:
    """How many bytes of ``text`` are left when a character that has only begun at its end is taken away."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:
            needs = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) if needs <= back else len(text) - back
    return len(text)


class Reader:
    """Encodes pieces between borders with the draft model's tokenizer. It keeps no text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        encode = exact(tokenizer)
        self.piece: Callable[[bytes], tuple[int, ...]] = lambda text: tuple(encode(text))
        self.start: tuple[int, ...] = tuple(tokenizer.encode(""))
        special = (token for token in range(len(tokenizer)) if tokenizer.token_bytes(token) is None)
        self.special: dict[str, int] = {tokenizer.token_text(token): token for token in special}
        """Ids of special tokens by name."""


class Reading:
    """One sequence's committed tokens as the draft model reads them.

    ``ids``: its tokens; ``held``: the bytes of an incomplete character at the end, which are not among them; ``read``:
    how many committed tokens were translated.
    """

    def __init__(self, ours: ChatTokenizer, theirs: Reader) -> None:
        self._ours, self._theirs = ours, theirs
        self._closed = list(theirs.start)
        self._open = b""
        self.read = 0
        self.ids: list[int] = list(theirs.start)
        self.held = b""

    def extend(self, tokens: Iterable[int]) -> None:
        """Translate tokens that were committed."""
        for token in tokens:
            self.read += 1
            text = self._ours.token_bytes(token)
            if text is not None:
                self._open += text
                continue
            self._closed += self._pieces(cut(self._open))
            self._open = b""
            known = self._theirs.special.get(self._ours.token_text(token))
            if known is not None and self._closed != [known]:  # what a text begins with may be written out
                self._closed.append(known)
        *closed, last = cut(self._open)
        self._closed += self._pieces(closed)
        self._open = last
        whole = whole_characters(last)
        self.ids = [*self._closed, *self._theirs.piece(last[:whole])]
        self.held = last[whole:]

    def _pieces(self, pieces: Iterable[bytes]) -> list[int]:
        return [token for piece in pieces for token in self._theirs.piece(piece)]


def written(tokenizer: ChatTokenizer, encode: Encode, committed: Seq[int], text: bytes) -> list[int]:
    """``text``, which follows the ``committed`` tokens, in the tokens of ``tokenizer``, encoded by ``encode``.

    The text of the last :data:`LOOK_BACK` committed tokens is encoded together with it, and where a token begins
    exactly at the border, the tokens from there on are taken; else the text is encoded by itself. An incomplete
    character at the end of ``text`` is left out.
    """
    text = text[: whole_characters(text)]
    if not text:
        return []
    before: list[bytes] = []
    for token in reversed(committed[max(0, len(committed) - LOOK_BACK) :]):
        piece = tokenizer.token_bytes(token)
        if piece is None:
            break
        before.append(piece)
    before.reverse()
    while before and before[0][:1] and before[0][0] & 0xC0 == 0x80:
        del before[0]  # it begins inside a character
    start = b"".join(before)
    ids, at, count = encode(start + text), 0, 0
    while at < len(start) and count < len(ids):
        at += len(tokenizer.token_bytes(ids[count]) or b"")
        count += 1
    return ids[count:] if at == len(start) else encode(text)

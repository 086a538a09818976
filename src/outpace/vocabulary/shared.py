"""Which tokens two vocabularies share, and how each token of one is written in the tokens of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from functools import lru_cache

import torch

from outpace.models.base import ChatTokenizer

_LONGEST = 1024
"""Draft tokens that one target token may turn into: some vocabularies hold whole lines of dashes."""


def exact(tokenizer: ChatTokenizer) -> Callable[[bytes], list[int]]:
    """An encoder, bytes to ids, of pieces out of the middle of a text, whose tokens' bytes are those of the piece.

    As the tokenizer encodes it where that keeps the bytes, else by the longest tokens that fit. Bytes that no token has
    are left out.
    """
    spell = Speller(tokenizer)

    def same(ids: Seq[int], piece: bytes) -> bool:
        return b"".join(tokenizer.token_bytes(token) or b"" for token in ids) == piece

    def encode(piece: bytes) -> list[int]:
        try:
            text = piece.decode()
        except UnicodeDecodeError:  # part of a character
            return spell(piece)
        before = tokenizer.encode("")
        ids = tokenizer.encode(text)[len(before) :]
        if same(ids, piece):
            return ids
        # SentencePiece puts a space before the first word of a text: give it a line before, and take that away.
        line, both = tokenizer.encode("\n"), tokenizer.encode("\n" + text)
        if both[: len(line)] == line and same(both[len(line) :], piece):
            return both[len(line) :]
        return spell(piece)

    return encode


class Speller:
    """Greedy encoding of bytes: the longest token that fits, then the longest that fits the rest, and so on."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.by_bytes: dict[bytes, int] = {}
        for token in range(len(tokenizer)):
            if text := tokenizer.token_bytes(token):
                self.by_bytes.setdefault(text, token)
        self._longest = max(map(len, self.by_bytes), default=0)

    def __call__(self, piece: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(piece):
            for stop in range(min(len(piece), at + self._longest), at, -1):
                if (token := self.by_bytes.get(piece[at:stop])) is not None:
                    ids.append(token)
                    at = stop
                    break
            else:
                at += 1
        return ids


class VocabularyMap:
    """The tokens that two vocabularies share, as pairs of ids: equal bytes, or special tokens of equal name.

    ``target_ids`` and ``draft_ids``, both (n,), are the pairs in ascending order of the target's. Ids that a model does
    not score (``target_size``, ``draft_size``) are left out. Of several ids for one string the lowest counts.
    """

    def __init__(self, target: ChatTokenizer, draft: ChatTokenizer, target_size: int, draft_size: int) -> None:
        self.target_size, self.draft_size = target_size, draft_size
        theirs = _names(draft, draft_size)
        pairs = {token: theirs[name] for name, token in _names(target, target_size).items() if name in theirs}
        self.target_ids = torch.tensor(sorted(pairs), dtype=torch.long)
        self.draft_ids = torch.tensor([pairs[token] for token in sorted(pairs)], dtype=torch.long)
        self.shared: dict[int, int] = pairs
        """Draft id by target id."""
        self._target = target
        self._encode = exact(draft)
        self._pieces: dict[int, tuple[int, ...]] = {token: (own,) for token, own in pairs.items()}
        self.start: tuple[int, ...] = tuple(draft.encode(""))
        """The special tokens that the draft model's texts begin with."""
        self.filler: int = (self._encode(b"\n") or self._encode(b" ") or [0])[0]
        """A token for the draft model to read where the translation is empty."""

    def __len__(self) -> int:
        return len(self.shared)

    def pieces(self, token: int) -> tuple[int, ...]:
        """The draft tokens of one target token: itself where both have it, else its text's.

        Its neighbours do not matter, so that the translation of a text never changes as the text goes on. Empty for
        special tokens that the draft vocabulary lacks: they are not text.
        """
        found = self._pieces.get(token)
        if found is None:
            found = tuple(self._encode(self._target.token_bytes(token) or b"")[:_LONGEST])
            self._pieces[token] = found
        return found

    def translate(self, tokens: Iterable[int]) -> list[int]:
        """The draft tokens of target tokens."""
        return [piece for token in tokens for piece in self.pieces(token)]


def _names(tokenizer: ChatTokenizer, size: int) -> dict[tuple[bool, bytes], int]:
    """The lowest id by (is it text?, bytes or name)."""
    names: dict[tuple[bool, bytes], int] = {}
    for token in range(min(size, len(tokenizer))):
        text = tokenizer.token_bytes(token)
        name = (True, text) if text is not None else (False, tokenizer.token_text(token).encode())
        if name[1]:
            names.setdefault(name, token)
    return names


@lru_cache(maxsize=8)
def vocabulary_map(target: ChatTokenizer, draft: ChatTokenizer, target_size: int, draft_size: int) -> VocabularyMap:
    """The map of a pair, made once: it takes a few tenths of a second for real vocabularies."""
    return VocabularyMap(target, draft, target_size, draft_size)

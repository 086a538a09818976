"""Building a datastore from tokenised documents; its file appears whole or not at all."""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from outpace.core.errors import BadInput
from outpace.core.files import atomic_file, home_expanded
from outpace.datastore.corpus import TokenPiece
from outpace.datastore.layout import ENTRY_BYTES, MOST_DEPTH, MOST_TOKENS, SEPARATORS, Header, digest
from outpace.datastore.suffixes import CHUNK, suffix_order

DEPTH = 32
"""Tokens of context that the index is sorted by, where nobody says how many."""
Advance = Callable[[str, int, int], None]
"""Called with the name of the stage, how much of it is done, and how much there is."""
_WIDE = SEPARATORS[4]


class Corpus:
    """Token ids of many documents, two bytes each where they fit, four otherwise. Empty documents do not count."""

    def __init__(self) -> None:
        self.documents = 0
        self._parts: list[npt.NDArray[Any]] = []
        self._fresh = array("I")
        self._begins = True

    def begin(self) -> None:
        """Start another document."""
        self._begins = True

    def extend(self, tokens: Seq[int]) -> None:
        """Add tokens to the document."""
        if not len(tokens):
            return
        if self._begins:
            self._fresh.append(_WIDE)
            self.documents += 1
            self._begins = False
        self._fresh.extend(tokens)
        if len(self._fresh) >= CHUNK:
            self._settle()

    def backwards(self) -> npt.NDArray[Any]:
        """The text as the file has it, (tokens,): last token first, a separator at either end. Empties the corpus.

        Raises BadInput for a corpus without text, and for one that has more tokens than the index can count.
        """
        self._settle()
        length = sum(map(len, self._parts)) + 1
        if not self.documents:
            raise BadInput("the corpus is empty: the files hold no text; name files with text in them")
        if length > MOST_TOKENS:
            raise BadInput(f"the corpus has {length:,} tokens, and a datastore holds {MOST_TOKENS:,}; build several")
        width = max(part.itemsize for part in self._parts)
        text = np.empty(length, f"u{width}")
        text[0] = SEPARATORS[width]
        at = 1
        while self._parts:  # the last part first, each given back as soon as it is copied
            part = self._parts.pop()
            target = text[at : at + len(part)]
            target[:] = part[::-1]
            if part.itemsize < width:
                target[target == SEPARATORS[part.itemsize]] = SEPARATORS[width]
            at += len(part)
        return text

    def _settle(self) -> None:
        if not self._fresh:
            return
        part = np.array(self._fresh, np.uint32)
        self._fresh = array("I")
        narrow = not ((part >= SEPARATORS[2]) & (part != _WIDE)).any()
        self._parts.append(part.astype(np.uint16) if narrow else part)  # a separator's lower half is a separator


def build_datastore(
    path: str | os.PathLike[str],
    pieces: Iterable[TokenPiece],
    fingerprint: str,
    model: str = "",
    *,
    depth: int = DEPTH,
    advance: Advance = lambda *_: None,
) -> Header:
    """Write the datastore of a tokenised corpus to ``path``; what was there is replaced in one step, at the end.

    ``fingerprint``, ``model``: the tokenizer's, and the name it goes by. ``depth``: the longest context that can be
    matched. Whatever interrupts it, ``path`` is left as it was and nothing is left beside it. Needs about 20 bytes of
    memory a token and 100 MB. Raises BadInput for an empty corpus and where the file cannot be written.
    """
    place = home_expanded(path)
    if place.exists() and not place.is_file():
        raise BadInput(f"cannot write the datastore '{place}': it is a folder or a device; name a file")
    corpus = Corpus()
    for piece in pieces:
        if piece.begins:
            corpus.begin()
        corpus.extend(piece.tokens)
        advance("reading", piece.read, piece.size)
    blocks = packed(corpus, fingerprint, model, depth, advance)
    header = next(blocks)
    _write_whole(place, header, blocks)
    return Header.read(header, str(place))


def packed(
    corpus: Corpus, fingerprint: str, model: str, depth: int = DEPTH, advance: Advance = lambda *_: None
) -> Iterator[bytes]:
    """The file, block by block, its header first. Empties the corpus; raises BadInput for a bad depth or corpus."""
    if not 1 <= depth <= MOST_DEPTH:
        raise BadInput(f"the depth of a datastore must be between 1 and {MOST_DEPTH}, not {depth}")
    documents = corpus.documents
    text = corpus.backwards()
    order = suffix_order(text, depth, advance=lambda done, total: advance("sorting", done, total))
    order = order[_continued(text, order)]
    width = text.dtype.itemsize
    header = Header(width, depth, documents, len(text), len(order), digest(fingerprint), model)

    def body() -> Iterator[bytes]:
        for numbers, kind in ((order, f"<u{ENTRY_BYTES}"), (text, f">u{width}")):
            for start in range(0, len(numbers), CHUNK):
                yield numbers[start : start + CHUNK].astype(kind).tobytes()

    checksum = 0
    for block in body():
        checksum = zlib.crc32(block, checksum)
    yield replace(header, checksum=checksum).pack()
    done = 0
    for block in body():
        yield block
        done += len(block)
        advance("writing", done, header.size)


def _continued(text: npt.NDArray[Any], order: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Which places have a token of a document before them and one after them."""
    inside = text != np.iinfo(text.dtype).max
    inside[1:] &= inside[:-1].copy()
    kept: npt.NDArray[np.bool_] = inside[order]
    return kept


def _write_whole(path: Path, header: bytes, blocks: Iterable[bytes]) -> None:
    try:
        with atomic_file(path) as unfinished, unfinished.open("wb") as file:
            _write_blocks(file, chain([header], blocks))
    except OSError as error:
        raise BadInput(f"cannot write the datastore '{path}': {error.strerror or error}") from None


def _write_blocks(file: BinaryIO, blocks: Iterable[bytes]) -> None:
    file.writelines(blocks)

"""Datastore: an opened corpus and its index, in which the longest known suffix of a context is found.

The index has the places of the corpus, sorted by the tokens before them, read backwards: the neighbours of a context
there share its longest suffix that occurs at all, so that a lookup costs three binary searches.
"""

from __future__ import annotations

import mmap
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from outpace.core.errors import BadInput
from outpace.core.files import file_version, home_expanded
from outpace.datastore.layout import HEADER_BYTES, REBUILD, Header, digest

_PARTS = 64
"""Parts that a sample of a corpus is made of."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where the last ``length`` tokens of a context occur: ``count`` entries of the index from ``first`` on."""

    length: int
    first: int
    count: int


class Datastore:
    """A read-only corpus of token ids with its index. Open one with :func:`open_datastore`.

    ``data``: the whole file, mapped or in memory. Raises BadInput, in one line that calls it ``place``, unless it is
    whole and undamaged.
    """

    def __init__(self, data: bytes | mmap.mmap, place: str = "the datastore") -> None:
        self.place = place
        self.header = header = Header.read(data[:HEADER_BYTES], place)
        if len(data) < header.size:
            raise BadInput(f"{place} is cut short: {len(data):,} of {header.size:,} bytes are there; {REBUILD}")
        if len(data) > header.size:
            raise BadInput(f"{place} is damaged: {len(data) - header.size:,} bytes follow its end; {REBUILD}")
        view = memoryview(data)
        if zlib.crc32(view[HEADER_BYTES:]) != header.checksum:
            raise BadInput(f"{place} is damaged: its content does not match its checksum; {REBUILD}")
        self._data = data
        self._index = np.frombuffer(view, "<u4", header.entries, HEADER_BYTES)
        self._text = np.frombuffer(view, f">u{header.width}", header.tokens, header.text_at)
        # Reading one number from a memory view takes a third of the time of reading it from an array.
        self._places: Any = view[HEADER_BYTES : header.text_at].cast("I") if np.little_endian else self._index
        self._key = np.dtype(f">u{header.width}")

    @classmethod
    def of(cls, documents: Iterable[Seq[int]], fingerprint: str = "", depth: int = 32) -> Datastore:
        """A datastore in memory. Raises BadInput when no document holds a token."""
        from outpace.datastore.build import Corpus, packed

        corpus = Corpus()
        for document in documents:
            corpus.begin()
            corpus.extend(document)
        return cls(b"".join(packed(corpus, fingerprint, "", depth)))

    @property
    def tokens(self) -> int:
        """Tokens of the corpus, separators left out."""
        return self.header.tokens - self.header.documents - 1

    def check_fingerprint(self, fingerprint: str) -> None:
        """Raise BadInput unless the corpus was tokenised with the vocabulary of this fingerprint."""
        if self.header.fingerprint != digest(fingerprint):
            made = f"'{self.header.model}'" if self.header.model else "another model"
            raise BadInput(
                f"{self.place} was tokenised for {made}, whose vocabulary is not this model's; "
                "build one with: outpace datastore build FILES... --model M --out PATH"
            )

    def find(self, context: Seq[int]) -> Found | None:
        """All places of the longest suffix of ``context`` (at most ``header.depth`` tokens) that has a continuation.

        None where the last token has none.
        """
        width, data, text_at = self.header.width, self._data, self.header.text_at
        key = self._backwards(context)
        size = len(key)

        def there(place: int) -> bytes:
            at = text_at + width * place
            return data[at : at + size]

        at = bisect_left(self._places, key, key=there)
        near = [there(self._places[i]) for i in (at - 1, at) if 0 <= i < len(self._places)]
        length = max((_common(key, one, width) for one in near), default=0)
        if not length:
            return None
        size = length * width
        first = bisect_left(self._places, key[:size], hi=at, key=there)
        stop = bisect_right(self._places, key[:size], lo=at, key=there)
        return Found(length, first, stop - first)

    def continuations(self, found: Found, most: int, depth: int) -> list[list[int]]:
        """The next tokens, up to ``depth`` of them, at up to ``most`` of the places found, evenly spread over them.

        A continuation ends with its document. The order is that of the index.
        """
        count = min(most, found.count)
        rows = found.first + np.arange(count) * found.count // max(1, count)
        places = self._index[rows].astype(np.int64)
        ahead = places[:, None] - np.arange(1, depth + 1)
        table = self._text[np.maximum(ahead, 0)].tolist()  # the text begins with a separator, and ends copies there
        end = self.header.separator
        return [row[: row.index(end)] if end in row else row for row in table]

    def documents(self) -> Iterator[list[int]]:
        """The corpus, document by document, in the order in which it was read."""
        text, end = self._text, self.header.separator
        stop = len(text) - 1
        for start in np.flatnonzero(text == end)[-2::-1].tolist():
            yield text[start + 1 : stop][::-1].tolist()
            stop = start

    def sample(self, most: int) -> Iterator[list[int]]:
        """Documents, or parts of them, from all over the corpus, of ``most`` tokens together at most; all of a corpus
        that has no more."""
        if self.tokens <= most:
            yield from self.documents()
            return
        text, end = self._text, self.header.separator
        count = max(1, min(_PARTS, most // _PARTS))
        size = most // count
        for part in range(count):
            stop = len(text) - len(text) * part // count  # the text runs backwards
            row = text[stop - size : stop][::-1]
            for document in np.split(row, np.flatnonzero(row == end)):
                tokens = document[document != end].tolist()
                if tokens:
                    yield tokens

    def _backwards(self, context: Seq[int]) -> bytes:
        """The bytes of a context's last tokens as the text has them, back to one that no corpus can hold."""
        end = self.header.separator
        key: list[int] = []
        for token in reversed(context[-self.header.depth :]):
            if not 0 <= token < end:
                break
            key.append(token)
        return np.array(key, self._key).tobytes()


def _common(one: bytes, other: bytes, width: int) -> int:
    """Leading tokens that two keys share."""
    low, high = 0, min(len(one), len(other)) // width
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * width] == other[: middle * width]:
            low = middle
        else:
            high = middle - 1
    return low


_OPEN: WeakValueDictionary[tuple[object, ...], Datastore] = WeakValueDictionary()
"""Datastores in use by what their files were when they were opened: methods that share one share its memory."""


def open_datastore(path: str | os.PathLike[str], fingerprint: str | None = None) -> Datastore:
    """Open a datastore, memory-mapped, and check that it is whole; this reads all of it once.

    ``fingerprint``: the tokenizer's (``ChatTokenizer.fingerprint``); a corpus of another vocabulary is refused. Raises
    BadInput for a file that is missing, damaged, cut short or no datastore.
    """
    place = home_expanded(path)
    name = f"datastore '{place}'"
    if not place.exists():
        raise BadInput(f"{name} does not exist; build one with: outpace datastore build FILES... --model M --out PATH")
    try:
        with place.open("rb") as file:
            stat = os.fstat(file.fileno())
            seen = str(place.resolve()), file_version(stat)
            store = _OPEN.get(seen)
            if store is None:
                # An empty file cannot be mapped.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if stat.st_size else b""
                store = _OPEN[seen] = Datastore(data, name)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
    if fingerprint is not None:
        store.check_fingerprint(fingerprint)
    return store

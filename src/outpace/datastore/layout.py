"""The file format of a datastore.

::

    header   256 bytes, little-endian: the fields of :class:`Header`, then their CRC-32
    index    ``entries`` places in the text, 4 bytes each, little-endian, in the order of the text from there on
    text     ``tokens`` token ids, last token of the corpus first, 2 or 4 bytes each, **big-endian**

The text is stored backwards and big-endian: the bytes from a place on are the context before it, last token first, so
that comparing bytes compares contexts. Documents are separated by a token that no vocabulary has; one more stands at
either end. Only places with a token after them have an entry, so every match has a continuation.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass

from outpace.core.errors import BadInput

MAGIC = b"OUTPACED"
VERSION = 1
HEADER_BYTES = 256
ENTRY_BYTES = 4
SEPARATORS = {2: 0xFFFF, 4: 0xFFFFFFFF}
"""The token that separates documents, by bytes a token."""
MOST_TOKENS = 2**32 - 2
MOST_DEPTH = 1024

_FIELDS = struct.Struct("<8sIIIIQQQ32s64s")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a datastore. ``width``: bytes a token; ``depth``: tokens of context that the index is sorted by."""

    width: int
    depth: int
    documents: int
    tokens: int
    entries: int
    fingerprint: bytes
    """SHA-256 of the tokenizer's fingerprint."""
    model: str
    """The name that the tokenizer was loaded by, for messages; at most 64 bytes of it."""
    checksum: int = 0
    """CRC-32 of everything after the header."""

    @property
    def text_at(self) -> int:
        """Where the text begins in the file."""
        return HEADER_BYTES + ENTRY_BYTES * self.entries

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.text_at + self.width * self.tokens

    @property
    def separator(self) -> int:
        """The token between documents."""
        return SEPARATORS[self.width]

    def pack(self) -> bytes:
        """The header's bytes."""
        name = self.model.encode("utf-8", "replace")[:64].decode("utf-8", "ignore").encode()
        numbers = (VERSION, self.width, self.depth, self.checksum, self.documents, self.tokens, self.entries)
        fields = _FIELDS.pack(MAGIC, *numbers, self.fingerprint, name)
        padded = fields.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return padded + _CRC.pack(zlib.crc32(padded))

    @classmethod
    def read(cls, raw: bytes, place: str) -> Header:
        """The header in ``raw``, the beginning of the file called ``place``. Raises BadInput for what is not one."""
        if not raw.startswith(MAGIC):
            if MAGIC.startswith(raw):
                raise BadInput(f"{place} is empty or cut short; {REBUILD}")
            raise BadInput(f"{place} is not a datastore; build one with: outpace datastore build")
        if len(raw) < HEADER_BYTES:
            raise BadInput(f"{place} is cut short; {REBUILD}")
        _, version, width, depth, checksum, documents, tokens, entries, fingerprint, name = _FIELDS.unpack_from(raw)
        if version != VERSION:
            raise BadInput(f"{place} has format {version}, and this outpace reads format {VERSION}; {REBUILD}")
        body = raw[: HEADER_BYTES - _CRC.size]
        (crc,) = _CRC.unpack_from(raw, len(body))
        model = name.rstrip(b"\0").decode("utf-8", "replace")
        header = cls(width, depth, documents, tokens, entries, fingerprint, model, checksum)
        if crc != zlib.crc32(body) or not header.is_possible():
            raise BadInput(f"{place} is damaged (its header); {REBUILD}")
        return header

    def is_possible(self) -> bool:
        """Whether the counts can be those of a datastore."""
        return (
            self.width in SEPARATORS
            and 0 < self.depth <= MOST_DEPTH
            and 0 < self.documents < self.tokens <= MOST_TOKENS
            and self.entries <= self.tokens - self.documents - 1
        )


REBUILD = "build it again with: outpace datastore build"


def digest(fingerprint: str) -> bytes:
    """A tokenizer's fingerprint, in 32 bytes."""
    return hashlib.sha256(fingerprint.encode()).digest()

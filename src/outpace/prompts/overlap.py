"""Which prompts must not be trained on: those that a bench asks, and those that were collected before.

A prompt overlaps with a bench prompt when they have one run of eight words in common, the usual test for contamination
in reports of the field. Two prompts are near duplicates when the Jaccard similarity of their word triples is at least
0.8; it is estimated from the smallest hashes of each (bottom-k sketches, Broder 1997), so that memory does not grow
with the length of prompts.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

WORDS = 8
"""Length, in words, of a run that a bench prompt and a training prompt must not have in common."""
_SHORT = 4
"""Bench prompts of fewer words than this overlap only with the same whole prompt: "thank you" is in many texts."""
ALIKE = 0.8
"""Jaccard similarity of word triples, in [0, 1], from which prompts are near duplicates."""
_SHINGLE = 3
_SKETCH = 48
"""Hashes kept of each prompt."""
_WORD = re.compile(r"\w+")


def normal(text: str) -> str:
    """A text for comparison: NFKC, casefolded, single spaces, no punctuation at its ends."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip(".!?,;: ") or folded


def words(text: str) -> list[str]:
    """The words of a text, casefolded and without punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _grams(found: Sequence[str], size: int) -> Iterator[int]:
    for start in range(len(found) - size + 1):
        yield _hash(found[start : start + size])


def _hash(found: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(found).encode(), digest_size=8).digest(), "big")


class Overlap:
    """A set of texts that training must not see; ``text in overlap`` says whether one has ``size`` words in a row in
    common with any of them."""

    def __init__(self, texts: Iterable[str], size: int = WORDS) -> None:
        self.size = size
        self._by_length: dict[int, set[int]] = {}
        self._whole: set[str] = set()
        for text in texts:
            found = words(text)
            if len(found) < _SHORT:
                self._whole.add(normal(text))
            else:
                # A text of fewer words than ``size`` is one run as a whole.
                length = min(size, len(found))
                self._by_length.setdefault(length, set()).update(_grams(found, length))

    def __contains__(self, text: str) -> bool:
        found = words(text)
        return normal(text) in self._whole or any(
            gram in known for length, known in self._by_length.items() for gram in _grams(found, length)
        )


class Seen:
    """The prompts collected so far; finds exact and near duplicates. ``alike``: the threshold, as :data:`ALIKE`."""

    def __init__(self, alike: float = ALIKE) -> None:
        self.alike = alike
        self._exact: set[str] = set()
        self._sketches: list[frozenset[int]] = []
        self._by_hash: dict[int, list[int]] = {}

    def add(self, text: str) -> None:
        """Enter a prompt."""
        self._exact.add(normal(text))
        sketch = _sketch(text)
        for value in sketch:
            self._by_hash.setdefault(value, []).append(len(self._sketches))
        self._sketches.append(sketch)

    def duplicate(self, text: str) -> bool:
        """Whether this text was entered, up to case, space and punctuation at its ends."""
        return normal(text) in self._exact

    def near(self, text: str) -> bool:
        """Whether a text was entered whose word triples are about the same (``alike``)."""
        sketch = _sketch(text)
        common: dict[int, int] = {}
        for value in sketch:
            for index in self._by_hash.get(value, ()):
                common[index] = common.get(index, 0) + 1
        return any(
            _resemblance(sketch, self._sketches[index]) >= self.alike
            for index, count in common.items()
            if count >= self.alike * max(len(sketch), len(self._sketches[index]))
        )


def _sketch(text: str) -> frozenset[int]:
    found = words(text)
    shingles = set(_grams(found, min(_SHINGLE, len(found)))) if found else set()
    return frozenset(sorted(shingles)[:_SKETCH])


def _resemblance(one: frozenset[int], other: frozenset[int]) -> float:
    """Jaccard similarity, in [0, 1]. A full sketch lacks hashes beyond its largest: they are left out of the count."""
    together = one | other
    ends = [max(sketch) for sketch in (one, other) if len(sketch) == _SKETCH]
    if ends:
        together = frozenset(value for value in together if value <= min(ends))
    return len(one & other & together) / len(together) if together else 0.0

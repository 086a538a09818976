"""Which prompts must not be trained on: what a bench asks, and what was there before.

Overlap with a bench is told by word n-grams: one run of eight words in common is enough, as the reports of the field
have it. Near duplicates are told by how many of their word triples two prompts share: estimated from the smallest
hashes of each (bottom-k sketches, Broder 1997), so that memory does not grow with the length of prompts.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from outpace.prompts.questions import load_prompts

WORDS = 8
"""Words in a row that a bench prompt and a training prompt may not have in common."""
_SHORT = 4
"""Bench prompts of fewer words than this are looked for as whole prompts alone: anybody may say "thank you"."""
ALIKE = 0.8
"""Share of common word triples (Jaccard) from which prompts are near duplicates."""
_SHINGLE, _SKETCH = 3, 48
_WORD = re.compile(r"\w+")


def normal(text: str) -> str:
    """A text as it is compared: one case, one kind of space, no punctuation at its ends."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip(".!?,;: ") or folded


def words(text: str) -> list[str]:
    """The words of a text, in one case and without punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _grams(found: Sequence[str], size: int) -> Iterator[int]:
    for start in range(len(found) - size + 1):
        yield _hash(found[start : start + size])


def _hash(found: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(found).encode(), digest_size=8).digest(), "big")


class Overlap:
    """Texts that training must not see, by their runs of ``size`` words."""

    def __init__(self, texts: Iterable[str], size: int = WORDS) -> None:
        self.size = size
        self._by_length: dict[int, set[int]] = {}
        self._whole: set[str] = set()
        for text in texts:
            found = words(text)
            if len(found) < _SHORT:
                self._whole.add(normal(text))
            else:
                # A prompt that is shorter than a run is one itself.
                length = min(size, len(found))
                self._by_length.setdefault(length, set()).update(_grams(found, length))

    def __contains__(self, text: str) -> bool:
        found = words(text)
        return normal(text) in self._whole or any(
            gram in known for length, known in self._by_length.items() for gram in _grams(found, length)
        )


def bench_texts(files: Iterable[Path] = ()) -> list[str]:
    """What benches ask: the prompts that come with the package, and those of ``files``, every turn of them.

    Raises BadInput for a file without prompts.
    """
    from outpace.prompts.sources import read_rows

    texts = [turn for prompt in load_prompts() for turn in prompt.turns]
    for file in files:
        texts += [text for row in read_rows(file) for text in row.texts]
    return texts


class Seen:
    """Prompts that there are already; tells exact and near duplicates."""

    def __init__(self, alike: float = ALIKE) -> None:
        self.alike = alike
        self._exact: set[str] = set()
        self._sketches: list[frozenset[int]] = []
        self._by_hash: dict[int, list[int]] = {}

    def add(self, text: str) -> None:
        """From now on this one is there."""
        self._exact.add(normal(text))
        sketch = _sketch(text)
        for value in sketch:
            self._by_hash.setdefault(value, []).append(len(self._sketches))
        self._sketches.append(sketch)

    def duplicate(self, text: str) -> bool:
        """Whether this very text is there, up to case, space and punctuation at its ends."""
        return normal(text) in self._exact

    def near(self, text: str) -> bool:
        """Whether a text is there that shares most of its word triples."""
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
    """Jaccard similarity; of hashes up to the largest of a full sketch, which says nothing about those beyond."""
    together = one | other
    ends = [max(sketch) for sketch in (one, other) if len(sketch) == _SKETCH]
    if ends:
        together = frozenset(value for value in together if value <= min(ends))
    return len(one & other & together) / len(together) if together else 0.0

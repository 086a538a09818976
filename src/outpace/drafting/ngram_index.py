"""An index of the n-grams of a growing text, for lookup of what followed the last tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import Literal

Prefer = Literal["latest", "earliest"]


class NgramIndex:
    """The positions after the latest, or earliest, occurrence of every n-gram (min_ngram <= n <= max_ngram)."""

    def __init__(self, min_ngram: int, max_ngram: int, prefer: Prefer = "latest") -> None:
        self.text: list[int] = []
        self.latest = prefer == "latest"
        self._after: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (n, {}) for n in range(max_ngram, min_ngram - 1, -1)
        ]
        self._run = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; a negative one separates texts."""
        text, latest, after = self.text, self.latest, self._after
        for token in tokens:
            if token < 0:
                self._run = 0
            else:
                # Only now do the n-grams that end here have a continuation, so the last n-gram never finds itself.
                end = len(text)
                for n, where in after:
                    if n <= self._run:
                        key = tuple(text[end - n :])
                        if latest or key not in where:
                            where[key] = end
                self._run += 1
            text.append(token)

    def find(self, tail: Seq[int]) -> tuple[int, int] | None:
        """Position after the preferred occurrence of the longest known suffix of ``tail``, and its length; or None."""
        for n, where in self._after:
            if n <= len(tail) and (start := where.get(tuple(tail[len(tail) - n :]))) is not None:
                return start, n
        return None

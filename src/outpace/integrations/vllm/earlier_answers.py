"""Earlier answers of a namespace: what drafters that copy from text may copy from in its later requests."""

from __future__ import annotations

from collections import deque

from outpace.core.lru import Lru
from outpace.targets.base import Sequence

_BEFORE = 16
"""Tokens of the prompt that are kept with an answer, so that its beginning can be found."""
_SHORTEST = 8
_NAMESPACES = 64


class EarlierAnswers:
    """The last answers of each namespace, of ``most`` tokens together; the least recently used namespaces leave.

    Greedy and sampled requests of a name are kept apart, as all that drafters remember is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: Lru[tuple[str, bool], deque[tuple[int, ...]]] = Lru(_NAMESPACES)

    def texts(self, namespace: str, *, greedy: bool = True) -> tuple[tuple[int, ...], ...]:
        """What a new request of this namespace may copy from; nothing without a namespace."""
        found = self._texts.get((namespace, greedy)) if namespace and self._most else None
        return tuple(found or ())

    def add(self, sequence: Sequence) -> None:
        """A request has ended: keep its answer for later ones of its namespace."""
        answer = sequence.tokens[sequence.prompt_length :]
        if not sequence.namespace or not self._most or len(answer) < _SHORTEST:
            return
        key = sequence.namespace, sequence.params.greedy
        texts = self._texts.get(key)
        if texts is None:
            texts = deque()
            self._texts.put(key, texts)
        texts.append(tuple(sequence.tokens[max(0, sequence.prompt_length - _BEFORE) :][-self._most :]))
        while sum(map(len, texts)) > self._most:
            texts.popleft()

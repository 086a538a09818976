"""How long a learned drafter drafts, read off its last drafts; and how much longer rounds take after it has."""

from __future__ import annotations

from collections import deque
from statistics import median

_FEW, _CLOCKED = 3, 9
_PAIRS, _LEAST_PAIRS = 31, 9
"""Pairs of rounds that the difference is the median of."""


class Clock:
    """How long the learned drafter drafts, by how many sequences together; the median of the last times."""

    def __init__(self) -> None:
        self._spent: dict[int, deque[float]] = {}
        self._usual: dict[int, float] = {}
        self._reads = 0
        self._reading: dict[int, deque[float]] = {}
        """Seconds for texts that were read before a draft, by their lengths in powers of two: what few tokens take says
        little of many."""

    def read(self, count: int, seconds: float) -> bool:
        """A draft for ``count`` sequences took ``seconds``. Returns whether it changes what others take: at first every
        one does, later one in :data:`_CLOCKED`, since much is kept that depends on it."""
        self._reads += 1
        size = (count - 1).bit_length()
        spent = self._spent.setdefault(size, deque(maxlen=_CLOCKED))
        full = len(spent) == _CLOCKED
        spent.append(seconds)
        if len(spent) < _FEW or (full and self._reads % _CLOCKED):
            return False
        self._usual[size] = median(spent)
        return True

    def seconds(self, count: int) -> float | None:
        """What a draft for ``count`` sequences takes; None where too few were timed."""
        return self._usual.get((count - 1).bit_length())

    def settled(self, count: int) -> float | None:
        """The same, once it was timed so often that a few slow drafts do not matter."""
        size = (count - 1).bit_length()
        return self._usual[size] if len(self._spent.get(size, ())) == _CLOCKED else None

    def read_text(self, tokens: int, seconds: float) -> None:
        """Reading ``tokens`` of texts before a draft took ``seconds``."""
        size = tokens.bit_length()
        self._reading.setdefault(size, deque(maxlen=_CLOCKED)).append(max(0.0, seconds))

    def reading(self, tokens: int) -> float:
        """What reading so many tokens of a text takes; 0 before any were timed."""
        if not self._reading or not tokens:
            return 0.0
        size = tokens.bit_length()
        nearest = min(self._reading, key=lambda known: (abs(known - size), known))
        return median(self._reading[nearest]) * 2.0 ** (size - nearest)


class Aftereffect:
    """How much longer the rest of a round takes after a learned draft than after none. The draft has emptied the
    processor's caches of what the target's forward reads, and its tokens are united with others and learned from.

    A round with a draft is compared with one beside it of the same request, which has as long a context, on a machine
    that is as busy.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_PAIRS)
        self.share = 0.0
        """Of the time of a round; 0 before enough rounds were compared."""

    def saw(self, asked: float, alone: float) -> None:
        """The rest of a round with a draft took ``asked``, and that of one before or after it without ``alone``, each
        beside what its rows cost."""
        if alone > 0.0:
            self._ratios.append(asked / alone)
            if len(self._ratios) >= _LEAST_PAIRS:
                self.share = max(0.0, median(self._ratios) - 1.0)

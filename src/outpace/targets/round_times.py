"""How long whole rounds take beside the forwards of a cost table, and whether the table is to be believed.

A round is more than its forward: tokens are chosen, hidden states are kept, and what runs after a draft finds cold
caches. And a machine may be busier now than when its costs were measured, or may have been busy then. So every round
that ends is compared with what the table has for its forward.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

_KEPT = 15
"""Rounds of one size that are remembered."""
_WEIGHT = 4.0
"""The ratio of all sizes together counts as so many rounds of one size."""
_NOW = 16
"""Rounds of any size that show how fast the machine is now."""
_FADE = 32
"""Rounds of other sizes after which what a size has shown weighs half: else a size that was slow once, as the first
rounds of a process are, would never be drafted for again, and so never show anything else."""
_OUTLIER = 4.0
"""A round that takes so many times what is usual was held up by something else, and counts as so many times that: with
all of it the rounds after it would seem quick."""
_LOOK = 8
"""Rounds after which it is looked again at what is usual."""
_REFRESH = 64
"""Rounds after which ratios that were read are out of date."""
TOO_LONG = 0.8
"""Whole rounds that take less than this share of the table's forward prove that the table was written on a busy
machine."""
PATIENCE = 256
"""Rounds before a table is doubted for the second time; twice as many before the third."""


class RoundTimes:
    """Ratios of the time of rounds, without their drafts, to the table's forwards; by number of rows.

    ``version`` changes where ratios that were read before are out of date.
    """

    def __init__(self) -> None:
        self.version = 0
        self._beside: dict[int, deque[float]] = {}
        """Ratios of every size, each as a multiple of what was usual when it was timed: a machine that is slower for a
        while, as those are that others use, is so for every size."""
        self._last: dict[int, int] = {}
        """The newest round of every size, by their number."""
        self._now: deque[float] = deque(maxlen=_NOW)
        self._all: deque[float] = deque(maxlen=4 * _KEPT)
        self._usual = 0.0
        """The median of all, as of a few rounds ago: this runs in every round."""
        self._read: tuple[int, dict[int, float]] = 0, {}
        """Ratios that were read, of which version."""
        self._quickest: dict[int, deque[float]] = {}
        self._rounds = 0
        self._doubts, self._doubted = 0, 0

    @property
    def known(self) -> bool:
        """Whether so many rounds were timed that they show more than one moment."""
        return len(self._all) >= _NOW

    def add(self, rows: int, ratio: float) -> bool:
        """A round over ``rows`` rows took ``ratio`` times the table's forward. Returns whether the table is wrong."""
        self._rounds += 1
        size = rows.bit_length()
        undisturbed = min(ratio, _OUTLIER * self._usual) if self._all else ratio
        self._now.append(undisturbed)
        self._beside.setdefault(size, deque(maxlen=_KEPT)).append(undisturbed / fmean(self._now))
        self._last[size] = self._rounds
        self._all.append(ratio)
        if len(self._all) < _NOW or self._rounds % _LOOK == 0:
            self._usual = median(self._all)
        if self._rounds in (2, 4, 8) or len(self._all) == _NOW or self._rounds % _REFRESH == 0:
            self.version += 1
        seen = self._quickest.setdefault(size, deque(maxlen=_KEPT))
        seen.append(ratio)
        wrong = ratio < TOO_LONG and len(seen) == _KEPT and median(seen) < TOO_LONG
        return wrong and (not self._doubts or self._rounds - self._doubted >= PATIENCE << (self._doubts - 1))

    def ratio(self, rows: int) -> float:
        """What a round over ``rows`` rows takes, in forwards of the table; 1 before any was timed."""
        if self._read[0] != self.version:
            self._read = self.version, {}
        known, size = self._read[1], rows.bit_length()
        if size not in known:
            known[size] = self._ratio(size)
        return known[size]

    def _ratio(self, size: int) -> float:
        if not self._all:
            return 1.0
        usual, own = median(self._all), self._beside.get(size)
        if not own:
            return usual
        weight: float = len(own) * 0.5 ** ((self._rounds - self._last[size]) / _FADE)
        return usual * (_WEIGHT + weight * median(own)) / (_WEIGHT + weight)

    def doubt(self) -> None:
        """The table is measured again: what was compared with it is forgotten."""
        self._doubts, self._doubted = self._doubts + 1, self._rounds
        self._beside.clear()
        self._now.clear()
        self._all.clear()
        self._quickest.clear()
        self.version += 1

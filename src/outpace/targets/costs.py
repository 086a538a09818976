"""ForwardCosts: how long a target's forward takes, by number of rows, measured when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

from outpace.core.tree import TokenTree

_CONTEXT = 16
"""Committed tokens during a measurement. Few: prefilling them is most of what measuring a slow model costs."""
_CHAIN = 16
_REPEAT = 3
_ENOUGH = 0.05
"""Seconds for one size after which it is not repeated: noise is small beside a slow forward."""
_SLOW, _IN_PROPORTION = 0.1, 1.7
"""A forward that takes this many seconds and this many times as long as half its rows: larger ones are not measured but
extrapolated in proportion."""
_MOST_ROWS = 128
"""Costs are proportional to rows long before; measuring more would delay a large batch's first round by a second."""


class Scorer(Protocol):
    """The part of a target that measuring needs."""

    vocab_size: int
    context_length: int

    def sequence(self, prompt: Sequence[int], /) -> Any: ...

    def prefill(self, sequences: Sequence[Any], /) -> None: ...

    def score(self, batch: Sequence[tuple[Any, TokenTree]], /) -> Any: ...

    def close(self, kv: Any, /) -> None: ...


class ForwardCosts:
    """Seconds of one forward by number of rows: measured at powers of two when first needed, interpolated between.

    A measurement costs at most three forwards of its size, once for each target in a process: a fifth of a second for a
    small model, and about a second for a slow one.
    """

    def __init__(self, target: Scorer) -> None:
        self._target = target
        self._measured: dict[int, float] = {}

    def seconds(self, rows: int) -> float:
        """Of one forward over ``rows`` rows; beyond the largest measured size in proportion."""
        rows = max(1, rows)
        if rows > _MOST_ROWS:
            return self.seconds(_MOST_ROWS) * rows / _MOST_ROWS
        low = 1 << (rows.bit_length() - 1)
        below = self._at(low)
        if rows == low:
            return below
        return below + (self._at(2 * low) - below) * (rows - low) / low

    def _at(self, rows: int) -> float:
        if rows not in self._measured:
            # Noise makes a forward slower, never quicker; and more rows never cost less.
            least = max((cost for size, cost in self._measured.items() if size < rows), default=0.0)
            known = self._in_proportion(rows)
            self._measured[rows] = max(self._measure(rows) if known is None else known, least)
        return self._measured[rows]

    def _in_proportion(self, rows: int) -> float | None:
        """Twice the seconds of half the rows, where smaller sizes are slow and grow in proportion; else None."""
        half, quarter = self._measured.get(rows // 2), self._measured.get(rows // 4)
        if half is None or quarter is None or half < _SLOW or half < _IN_PROPORTION * quarter:
            return None
        return 2 * half

    def _measure(self, rows: int) -> float:
        target = self._target
        size = min(_CONTEXT, max(1, target.context_length // 2))
        sequence = target.sequence([(37 * i + 11) % target.vocab_size for i in range(size)])
        # Several chains on one sequence: scoring is pure, and no tree grows out of the context.
        sizes = [_CHAIN] * (rows // _CHAIN) or [rows]
        batch = [(sequence, TokenTree.chain(i % target.vocab_size for i in range(count - 1))) for count in sizes]
        best, spent = float("inf"), 0.0
        try:
            target.prefill([sequence])
            for _ in range(_REPEAT):
                began = perf_counter()
                target.score(batch)
                seconds = perf_counter() - began
                best, spent = min(best, seconds), spent + seconds
                if spent > _ENOUGH:
                    break
        finally:
            target.close(sequence.kv)
        return best

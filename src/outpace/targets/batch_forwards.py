"""BatchForwards: what a forward of several sequences takes, by their rows; and what reading a prompt does.

Eight sequences are not one sequence with eight rows: each has a K/V cache of its own, which is read once. So forwards
of a batch are measured as a batch, with one, two and four rows for each sequence, after a short and a longer context;
time is linear in the context. More rows are those of :meth:`~outpace.targets.costs.ForwardCosts.seconds`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outpace.core.progress import stage
from outpace.targets.cost_table import CostTable
from outpace.targets.threads import threads

if TYPE_CHECKING:
    from outpace.targets.cost_protocol import Scorer

_LARGEST = 32
"""Sequences that are measured together at most; more go on as from half of it to here."""
_LONGEST = 256
"""Tokens of each of them: K/V of 8,192 tokens at most is made for a measurement."""
_EACH = (1, 2, 4)
"""Rows of each sequence that are measured."""
_SLOW = 0.1
"""Seconds of a forward with a row for each sequence from which those with more rows are not measured."""
_REPEAT, _ENOUGH = 20, 0.4
"""Forwards of a size; seconds of them after which none is repeated."""
_READINGS = 7
"""Those of a prompt."""
_READ = (16, 64, 256)
"""Rows of prompts that are measured."""

Alone = Callable[[int, int], float]
"""Seconds of a forward over so many rows of one sequence, after so many tokens."""


class BatchForwards:
    """Of one target, measured when first needed and kept in ``table`` under ``name``.

    ``alone``: forwards of one sequence. ``clock``: seconds of a forward over so many rows of all sequences together.
    ``contexts``: those that are measured of one sequence.
    """

    def __init__(
        self,
        target: Scorer,
        table: CostTable,
        name: str,
        contexts: Sequence[int],
        alone: Alone,
        clock: Callable[[Sequence[Any], int], float],
    ) -> None:
        self._target, self._table, self._name = target, table, name
        self._alone, self._clock = alone, clock
        fitting = [size for size in contexts if size <= _LONGEST] or list(contexts[:1])
        self._short, self._long = fitting[0], fitting[-1]
        self._points: dict[tuple[int, int, int], tuple[float, ...]] = {}
        self._bounds: dict[tuple[int, int, int], tuple[float, ...]] = {}
        """Times that have proved too long: none that is measured again is longer."""

    def seconds(self, batch: int, context: float, rows: int | None = None) -> float:
        """Of ``batch`` sequences, two or more, after ``context`` tokens of each on average; ``rows`` of all together,
        by default one for each."""
        each = max(1.0, (rows or batch) / batch)
        short = self._by_batch(batch, each, self._short)
        if self._long == self._short:
            return short
        growth = max(0.0, self._by_batch(batch, each, self._long) - short)
        return short + growth * max(0.0, context - self._short) / (self._long - self._short)

    def known(self, batch: int) -> bool:
        """Whether nothing would have to be measured for :meth:`seconds`."""
        return all((size, one, threads()) in self._points for size in _around(batch) for one in self._contexts)

    @property
    def _contexts(self) -> set[int]:
        return {self._short, self._long}

    def doubt(self) -> None:
        """All of it is measured again when it is needed."""
        self._bounds |= self._points
        self._points.clear()

    def _by_batch(self, batch: int, each: float, context: int) -> float:
        low, high = _around(batch)
        below = self._by_rows(low, each, context)
        if low == high:
            return below
        return below + max(0.0, self._by_rows(high, each, context) - below) * (batch - low) / (high - low)

    def _by_rows(self, batch: int, each: float, context: int) -> float:
        """Of a size that is measured, with ``each`` rows for each sequence on average."""
        points = self._at(batch, context)
        if each >= _EACH[-1]:
            whole, most = round(batch * each), batch * _EACH[-1]
            return points[-1] + max(0.0, self._alone(whole, context) - self._alone(most, context))
        at = bisect_right(_EACH, each) - 1
        share = (each - _EACH[at]) / (_EACH[at + 1] - _EACH[at])
        return points[at] + share * (points[at + 1] - points[at])

    def _at(self, batch: int, context: int) -> tuple[float, ...]:
        """With each number of rows for each sequence."""
        point = batch, context, threads()
        if point not in self._points:
            of = f"{self._name} of {batch} sequences"
            names = [f"{of}, with {each} rows each after {context} tokens" for each in _EACH]
            bounds = self._bounds.get(point, (math.inf,) * len(_EACH))
            found = self._table.together(names, lambda: list(map(min, self._measured(batch, context), bounds)))
            self._points[point] = tuple(found)
        return self._points[point]

    def _measured(self, batch: int, context: int) -> list[float]:
        """By the quickest of a few forwards, beside the quickest of one sequence at the same moments: so other programs
        disturb all alike, and batches stay in proportion to what was measured of one sequence at another time."""
        best, single, spent = dict.fromkeys(_EACH, math.inf), math.inf, 0.0
        with (
            stage("measuring the costs of batches", brief=True, inner=True),
            self._target.round(),
            self._sequences(batch, context) as sequences,
        ):
            for _ in range(_REPEAT):
                one = self._clock(sequences[:1], 1)
                single, spent = min(single, one), spent + one
                for each in _EACH:
                    if each > 1 and best[1] >= _SLOW:
                        break
                    seconds = self._clock(sequences, each * batch)
                    best[each], spent = min(best[each], seconds), spent + seconds
                if spent > _ENOUGH:
                    break
        alone = self._alone(1, context)
        unit = alone / max(single, 1e-9)
        found = [max(alone, unit * best[1])]
        for each in _EACH[1:]:
            if math.isinf(best[each]):
                more = self._alone(each * batch, context) - self._alone(batch, context)
                found.append(max(found[-1], found[0] + more))
            else:
                found.append(max(found[-1], unit * best[each]))
        return found

    @contextmanager
    def _sequences(self, batch: int, context: int) -> Iterator[list[Any]]:
        """Sequences of ``context`` tokens, with K/V of their own."""
        found: list[Any] = []
        try:
            with made_up(self._target, context) as first:
                for _ in range(batch):
                    kv = self._target.fork(first.kv)
                    found.append(self._target.sequence(first.tokens, kv=kv))
            yield found
        finally:
            for one in found:
                self._target.close(one.kv)


class PromptReading:
    """What reading a prompt takes: a forward over its rows whose logits nobody needs. ``now``: the clock."""

    def __init__(self, target: Scorer, table: CostTable, name: str, now: Callable[[], float]) -> None:
        self._target, self._table, self._name, self._now = target, table, name, now
        room = target.context_length - 2
        self._sizes = [size for size in _READ if size <= room] or [max(1, room)]

    def seconds(self, rows: int) -> float:
        """Of ``rows`` rows at the beginning of a prompt; beyond the largest size in proportion."""
        sizes = self._sizes
        if rows >= sizes[-1]:
            return self._at(sizes[-1]) * rows / sizes[-1]
        above = next(index for index, size in enumerate(sizes) if rows <= size)
        high = self._at(sizes[above])
        if not above:
            return high
        low = self._at(sizes[above - 1])
        return low + max(0.0, high - low) * (rows - sizes[above - 1]) / (sizes[above] - sizes[above - 1])

    def _at(self, rows: int) -> float:
        return self._table.once(f"{self._name} of reading {rows} rows of a prompt", lambda: self._measured(rows))

    def _measured(self, rows: int) -> float:
        best, spent = math.inf, 0.0
        with stage("measuring how long prompts take to read", brief=True, inner=True), self._target.round():
            for _ in range(_READINGS):
                tokens = [(37 * i + 11) % self._target.vocab_size for i in range(rows + 1)]
                sequence = self._target.sequence(tokens)
                try:
                    began = self._now()
                    self._target.prefill([sequence])
                    seconds = self._now() - began
                finally:
                    self._target.close(sequence.kv)
                best, spent = min(best, seconds), spent + seconds
                if spent > _ENOUGH:
                    break
        return best


_CHAIN = 16


@contextmanager
def made_up(target: Scorer, context: int) -> Iterator[Any]:
    """A sequence of ``context`` committed tokens, all but a few of them made up."""
    size = min(_CHAIN, context)
    sequence = target.sequence([(37 * i + 11) % target.vocab_size for i in range(size)])
    try:
        target.prefill([sequence])
        target.lengthen(sequence, [11 % target.vocab_size] * (context - size))
        yield sequence
    finally:
        target.close(sequence.kv)


def _around(batch: int) -> tuple[int, int]:
    """The measured sizes next to ``batch``: the same twice where it is one of them; beyond the largest the last two."""
    if batch > _LARGEST:
        return _LARGEST // 2, _LARGEST
    low = 1 << (batch.bit_length() - 1)
    return (low, low) if low == batch else (low, 2 * low)

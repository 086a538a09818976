"""ForwardCosts: how long a target's forwards take here, by rows, sequences and the context of each.

A size is measured when it is first asked for, and kept in a :class:`CostTable`: forwards of one sequence, and of
several sequences with a row each, which read as many K/V caches. What is between two sizes that were measured is
interpolated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from outpace.core.progress import stage
from outpace.core.tree import TokenTree
from outpace.targets.batch_forwards import BatchForwards, PromptReading, made_up
from outpace.targets.cost_protocol import Costs, FixedCosts, Scorer
from outpace.targets.cost_table import CostTable
from outpace.targets.round_times import TOO_LONG, RoundTimes
from outpace.targets.threads import threads

__all__ = ["CONTEXTS", "OVERHEAD", "Costs", "FixedCosts", "ForwardCosts", "Scorer"]

CONTEXTS = (16, 256, 1024, 4096)
"""Numbers of committed tokens that are measured. Attention grows in proportion beyond; so larger K/V, which memory
might not hold, is not made for a measurement."""
_CHAIN = 16
_TOGETHER = (1, 2, 4, 8, 16, 32)
"""Numbers of rows that are measured together; larger ones each when they are asked for."""
_REPEAT = 7
_ENOUGH = 0.4
"""Seconds of forwards after which none is repeated: noise is small beside slow forwards."""
_SLOW, _IN_PROPORTION = 0.1, 1.7
"""A forward that takes this many seconds and this many times as long as half its rows: larger ones are not measured but
extrapolated in proportion."""
_MOST_ROWS = 128
"""Costs are proportional to rows long before; measuring more would delay a large batch's first round by a second."""

OVERHEAD = 5e-4
"""Seconds of a round beside its forward and its draft, nearly: what Python does, and sampling. Added where no clock may
be read."""


class ForwardCosts(Costs):
    """Measured at powers of two of rows, and at CONTEXTS, when first needed; those of several sequences by
    :class:`BatchForwards`.

    One context takes half a second for a small model, and a few forwards for a slow one; once for each target and
    machine. ``table``: None keeps times in memory. ``name``: whose forwards, in the table.
    """

    overhead = OVERHEAD

    def __init__(self, target: Scorer, table: CostTable | None = None, name: str = "forward") -> None:
        self._target = target
        self.table = CostTable() if table is None else table
        self._name = name
        self._points: dict[tuple[int, int, int], float] = {}
        self._bounds: dict[tuple[int, int, int], float] = {}
        """Times that have proved too long, where they were measured again: none is longer now."""
        self._lines: dict[tuple[int, int, int], tuple[float, float, int]] = {}
        """What follows from the points: by rows, place among the contexts and threads the seconds after the shorter
        context, how many more each token after it takes, and that context."""
        self._rounds = {False: RoundTimes(), True: RoundTimes()}
        """By whether requests sample, which takes time of its own."""
        self._contexts = [size for size in CONTEXTS if size + _CHAIN <= target.context_length] or [1]
        self._batches = BatchForwards(target, self.table, name, self._contexts, self.seconds, self._time)
        self._reading = PromptReading(target, self.table, name, self._now)

    def once(self, name: str, measure: Callable[[], float]) -> float:
        return self.table.once(name, measure)

    def beside(self, model: Scorer, name: str) -> Costs:
        return ForwardCosts(model, self.table, name)

    @property
    def version(self) -> int:
        return self._rounds[False].version + self._rounds[True].version

    @property
    def measurements(self) -> int:
        return self.table.measured

    def round_seconds(
        self, rows: int, context: int = 0, *, batch: int = 1, live: bool = False, sampled: bool = False
    ) -> float:
        forward = self.even(rows, batch, context)
        if not live:
            return forward + self.overhead
        timed = self._rounds[sampled and self._rounds[True].known]  # until one was, as greedy ones take
        return forward * timed.ratio(rows)

    def took(self, rows: int, context: int, seconds: float, *, greedy: bool, batch: int = 1) -> None:
        """Costs that whole rounds have come to undercut were measured on a busy machine: they are measured again.

        A machine that is busy now changes nothing of the table.
        """
        known = batch <= 1 and (rows, self._place(context), threads()) in self._lines
        if not known and not self._measures(rows, context, batch):  # nobody has asked for such costs
            return
        if self._rounds[not greedy].add(rows, seconds / self.even(rows, batch, context)):
            for one in self._rounds.values():
                one.doubt()
            self.table.forget(f"{self._name} of ")
            self._bounds |= self._points
            self._points.clear()
            self._lines.clear()
            self._batches.doubt()

    def correct(self, name: str, seconds: float) -> None:
        if seconds < TOO_LONG * self.table.known(name, 0.0):
            self.table.correct(name, seconds)

    def _measures(self, rows: int, context: int, batch: int) -> bool:
        """Whether everything is measured that the costs of such a forward follow from."""
        if batch > 1:
            return self._batches.known(batch)
        count = min(rows, _MOST_ROWS)
        low = 1 << (count.bit_length() - 1)
        sizes = {low} if count == low else {low, 2 * low}
        return all((size, one, threads()) in self._points for one in self._around(context) for size in sizes)

    def _place(self, context: int) -> int:
        """Which of the measured contexts is the first that is no shorter than ``context``; else the longest."""
        return min(bisect_left(self._contexts, context), len(self._contexts) - 1)

    def _around(self, context: int) -> list[int]:
        """The measured contexts next to ``context``, the shorter one first; the only one where there is no other."""
        above = self._place(context)
        return self._contexts[max(0, above - 1) : above + 1]

    def seconds(self, rows: int, context: int = 0) -> float:
        """Of one forward over ``rows`` rows; beyond the largest measured sizes in proportion."""
        known = rows, self._place(context), threads()
        line = self._lines.get(known)
        if line is None:  # asked for several times in every round
            line = self._lines[known] = self._line(rows, context)
        least, growth, short = line
        return least + growth * (context - short)

    def _line(self, rows: int, context: int) -> tuple[float, float, int]:
        short, *longer = self._around(context)
        least = self._by_rows(rows, short)
        if not longer:
            return least, 0.0, short
        [long] = longer
        growth = max(0.0, self._by_rows(rows, long) - least)  # more tokens never cost less, whatever the clock's noise
        return least, growth / (long - short), short

    def even(self, rows: int, batch: int = 1, context: int = 0) -> float:
        if batch <= 1:
            return self.seconds(rows, context)
        return self._batches.seconds(batch, context, rows)

    def forward(self, rows: Sequence[int], contexts: Sequence[int]) -> float:
        batch, total = len(rows), sum(rows)
        if batch == 1:
            return self.seconds(total, contexts[0])
        found = self._batches.seconds(batch, sum(contexts) / batch)
        if total > batch:  # the additional rows attend to their own contexts, and time is linear in these
            least = self._contexts[0]
            weighed = sum((own - 1) * max(context, least) for own, context in zip(rows, contexts, strict=True))
            own_context = weighed / (total - batch)
            found += self._batches.seconds(batch, own_context, total) - self._batches.seconds(batch, own_context)
        return found

    def reading(self, rows: int, context: int = 0) -> float:
        growth = self.seconds(rows, context) - self.seconds(rows, self._contexts[0]) if context else 0.0
        return self._reading.seconds(rows) + max(0.0, growth)

    def _by_rows(self, rows: int, context: int) -> float:
        rows = max(1, rows)
        if rows > _MOST_ROWS:
            return self._by_rows(_MOST_ROWS, context) * rows / _MOST_ROWS
        low = 1 << (rows.bit_length() - 1)
        below = self._at(low, context)
        if rows == low:
            return below
        return below + (self._at(2 * low, context) - below) * (rows - low) / low

    def _at(self, rows: int, context: int) -> float:
        """Of a size that is measured."""
        point = rows, context, threads()
        if point not in self._points:
            sizes = _TOGETHER if rows in _TOGETHER else (rows,)
            least = 0.0 if rows in _TOGETHER else self._at(rows // 2, context)
            found = self.table.together(
                [f"{self._name} of {size} rows after {context} tokens" for size in sizes],
                lambda: [max(least, seconds) for seconds in self._bounded(sizes, context)],
            )
            for size, seconds in zip(sizes, found, strict=True):
                self._points[size, context, threads()] = seconds
        return self._points[point]

    def _bounded(self, sizes: Sequence[int], context: int) -> list[float]:
        bounds = [self._bounds.get((size, context, threads()), math.inf) for size in sizes]
        return [min(found, bound) for found, bound in zip(self._measured(sizes, context), bounds, strict=True)]

    def _measured(self, sizes: Sequence[int], context: int) -> list[float]:
        """Of each size the quickest of a few forwards. They take turns, so that other programs disturb all alike."""
        best = dict.fromkeys(sizes, math.inf)
        spent = 0.0
        with (
            stage("measuring the costs of forwards", brief=True, inner=True),
            self._target.round(),
            made_up(self._target, context) as sequence,
        ):
            for _ in range(_REPEAT):
                for rows in sizes:
                    half, quarter = best.get(rows // 2, 0.0), best.get(rows // 4, math.inf)
                    if half >= _SLOW and half >= _IN_PROPORTION * quarter:
                        best[rows] = 2 * half
                        continue
                    seconds = self._time([sequence], rows)
                    best[rows], spent = min(best[rows], seconds), spent + seconds
                if spent > _ENOUGH:
                    break
        # More rows never cost less: where they seem to, those with fewer were disturbed.
        return [min(best[more] for more in sizes if more >= rows) for rows in sizes]

    def _time(self, sequences: Sequence[Any], rows: int) -> float:
        """Seconds of one forward over ``rows`` rows of one sequence, or of several together."""
        if len(sequences) > 1:
            each = rows // len(sequences)
            batch = [(one, TokenTree.chain([1 % self._target.vocab_size] * (each - 1))) for one in sequences]
        else:
            # Several chains on one sequence: scoring is pure, and no tree grows out of the context.
            sizes = [_CHAIN] * (rows // _CHAIN) or [rows]
            tokens = [i % self._target.vocab_size for i in range(_CHAIN)]
            batch = [(sequences[0], TokenTree.chain(tokens[: count - 1])) for count in sizes]
        began = self._now()
        self._target.score(batch)
        return self._now() - began

    def _now(self) -> float:
        import torch

        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)  # a forward returns before the device has run it
        return perf_counter()

"""Costs: how long a target's forwards take, by rows, sequences and the context of each; measured, or fixed.

:class:`ForwardCosts` measures a size when it is first asked for and keeps it in a :class:`CostTable`: forwards of one
sequence, and of several sequences with a row each, which read as many K/V caches. What is between
two sizes that were measured is interpolated. :class:`FixedCosts` are nominal, the same on every machine, and no clock
is read for them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from outpace.core.progress import stage
from outpace.core.tree import TokenTree
from outpace.targets.batch_forwards import BatchForwards, PromptReading, made_up
from outpace.targets.cost_table import CostTable
from outpace.targets.round_times import TOO_LONG, RoundTimes
from outpace.targets.threads import threads

if TYPE_CHECKING:
    import torch

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
NOMINAL, AMPLE, BEYOND = 0.05, 7, 0.2
"""Fixed costs of a draft token, in autoregressive steps: up to AMPLE of them and after. About what it costs on
processors where drafting gains at all; beyond some number of rows each costs in proportion everywhere."""


class Costs(ABC):
    """Seconds of a target's forwards."""

    fixed: bool = False
    """Whether they are nominal. Then no decision may depend on a clock, at any temperature."""
    overhead: float = 0.0
    """Seconds of a round beside its forward and its draft, where the forwards do not hold them."""

    @abstractmethod
    def seconds(self, rows: int, context: int = 0) -> float:
        """Of one forward over ``rows`` rows of one sequence, after ``context`` committed tokens."""

    def forward(self, rows: Sequence[int], contexts: Sequence[int]) -> float:
        """Of one forward over ``rows[i]`` rows of every sequence i, after ``contexts[i]`` committed tokens. Here as of
        one sequence with their mean context."""
        return self.seconds(sum(rows), sum(contexts) // len(contexts))

    def even(self, rows: int, batch: int = 1, context: int = 0) -> float:
        """Of one forward over ``rows`` rows, shared out among ``batch`` sequences of ``context`` tokens; each has one
        at least."""
        each, more = divmod(max(rows, batch), batch)
        return self.forward([each + (at < more) for at in range(batch)], [context] * batch)

    def reading(self, rows: int, context: int = 0) -> float:
        """Of reading ``rows`` tokens of a prompt after ``context`` others, of which no logits are needed."""
        return self.seconds(rows, context)

    @abstractmethod
    def once(self, name: str, measure: Callable[[], float]) -> float:
        """What ``measure`` gave when ``name`` was first asked for on this machine, in seconds. Not for fixed costs."""

    @abstractmethod
    def beside(self, model: Scorer, name: str) -> Costs:
        """Costs of a small model that was made for this target, kept with the target's own under ``name``."""

    def relative(self, count: int, batch: int = 1, context: int = 0) -> float:
        """A round with ``count`` draft tokens for each of ``batch`` requests, in autoregressive steps of the batch."""
        return self.even(batch * (1 + count), batch, context) / self.even(batch, batch, context)

    def round_seconds(self, rows: int, context: int = 0, *, batch: int = 1, live: bool = False) -> float:
        """Of a whole round over ``rows`` rows of ``batch`` requests, without its draft. ``live``: as rounds of greedy
        requests have turned out to take in this process; otherwise as recorded, so that the same seed gives the same
        answer."""
        return self.even(rows, batch, context) + self.overhead

    def took(self, rows: int, context: int, seconds: float, *, greedy: bool, batch: int = 1) -> None:  # noqa: B027
        """A round over ``rows`` rows of ``batch`` requests took ``seconds`` without its draft."""

    def correct(self, name: str, seconds: float) -> None:  # noqa: B027 (fixed costs have no records)
        """What has a record under ``name`` (:meth:`once`) has come to take ``seconds``. A record that proves far too
        long was made on a busy machine, and is replaced."""

    @property
    def version(self) -> int:
        """Changes where times that were read before are out of date."""
        return 0

    @property
    def measurements(self) -> int:
        """How many times were measured in this process, which takes time of the requests that needed them."""
        return 0

    def steps(self, seconds: Callable[[], float], nominal: float, batch: int = 1, context: int = 0) -> float:
        """A time in autoregressive steps of ``batch`` requests; ``nominal`` where costs are fixed."""
        return nominal if self.fixed else seconds() / self.even(batch, batch, context)


class FixedCosts(Costs):
    """Nominal costs in autoregressive steps. Neither the batch nor the context changes them: a sampled request drafts
    what its seed, its prompt and the model determine."""

    fixed = True

    def seconds(self, rows: int, context: int = 0) -> float:
        count = max(0, rows - 1)
        return 1.0 + NOMINAL * count + (BEYOND - NOMINAL) * max(0, count - AMPLE)

    def relative(self, count: int, batch: int = 1, context: int = 0) -> float:
        return self.seconds(1 + count)

    def once(self, name: str, measure: Callable[[], float]) -> float:
        raise ValueError(f"fixed costs measure nothing, and so not '{name}'")

    def beside(self, model: Scorer, name: str) -> Costs:
        return self


class Scorer(Protocol):
    """The part of a target that measuring needs."""

    vocab_size: int
    context_length: int

    @property
    def device(self) -> torch.device: ...

    def round(self) -> AbstractContextManager[None]: ...

    def sequence(self, prompt: Sequence[int], /, *, kv: Any = None) -> Any: ...

    def fork(self, kv: Any, /) -> Any: ...

    def prefill(self, sequences: Sequence[Any], /) -> None: ...

    def lengthen(self, sequence: Any, tokens: Sequence[int], /) -> None: ...

    def score(self, batch: Sequence[tuple[Any, TokenTree]], /) -> Any: ...

    def close(self, kv: Any, /) -> None: ...


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
        self._rounds = RoundTimes()
        self._contexts = [size for size in CONTEXTS if size + _CHAIN <= target.context_length] or [1]
        self._batches = BatchForwards(target, self.table, name, self._contexts, self.seconds, self._time)
        self._reading = PromptReading(target, self.table, name, self._now)

    def once(self, name: str, measure: Callable[[], float]) -> float:
        return self.table.once(name, measure)

    def beside(self, model: Scorer, name: str) -> Costs:
        return ForwardCosts(model, self.table, name)

    @property
    def version(self) -> int:
        return self._rounds.version

    @property
    def measurements(self) -> int:
        return self.table.measured

    def round_seconds(self, rows: int, context: int = 0, *, batch: int = 1, live: bool = False) -> float:
        forward = self.even(rows, batch, context)
        return forward * self._rounds.ratio(rows) if live else forward + self.overhead

    def took(self, rows: int, context: int, seconds: float, *, greedy: bool, batch: int = 1) -> None:
        """Costs that whole rounds have come to undercut were measured on a busy machine: they are measured again.

        A machine that is busy now changes nothing of the table.
        """
        known = batch <= 1 and (rows, self._place(context), threads()) in self._lines
        if not known and not self._measures(rows, context, batch):  # nobody has asked for such costs
            return
        if self._rounds.add(rows, seconds / self.even(rows, batch, context), greedy=greedy):
            self._rounds.doubt()
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
        sizes: set[int] = set()
        for count in {min(rows, _MOST_ROWS), min(batch, _MOST_ROWS)}:
            low = 1 << (count.bit_length() - 1)
            sizes |= {low} if count == low else {low, 2 * low}
        known = all((size, one, threads()) in self._points for one in self._around(context) for size in sizes)
        return known and (batch <= 1 or self._batches.known(batch))

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
        return self._batches.seconds(batch, context) + self._more(rows, batch, context)

    def forward(self, rows: Sequence[int], contexts: Sequence[int]) -> float:
        batch, total = len(rows), sum(rows)
        if batch == 1:
            return self.seconds(total, contexts[0])
        found = self._batches.seconds(batch, sum(contexts) / batch)
        for own, context in zip(rows, contexts, strict=True):
            if own > 1:  # its share of the additional rows, which attend to its own context
                found += (own - 1) / (total - batch) * self._more(total, batch, context)
        return found

    def reading(self, rows: int, context: int = 0) -> float:
        growth = self.seconds(rows, context) - self.seconds(rows, self._contexts[0]) if context else 0.0
        return self._reading.seconds(rows) + max(0.0, growth)

    def _more(self, rows: int, batch: int, context: int) -> float:
        """What ``rows`` rows take more than ``batch`` do, after as many tokens."""
        return max(0.0, self.seconds(rows, context) - self.seconds(batch, context)) if rows > batch else 0.0

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
        """Seconds of one forward over ``rows`` rows after one sequence, or over a row of each of several."""
        if len(sequences) > 1:
            batch = [(one, TokenTree()) for one in sequences]
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

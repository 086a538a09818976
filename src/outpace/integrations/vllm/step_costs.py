"""How much longer a step of the engine takes for every row that it verifies, learned from its own steps.

The plug-in sees the time between two calls, and how many rows the step between them had. A line through these is all
that the choice of a draft length needs: the seconds of a step without rows, and of each row.
"""

from __future__ import annotations

PRIOR = 0.05
"""Before anything was seen: a row in steps of one row, as it is on processors where drafting gains at all."""
_PRIOR_WEIGHT = 40.0
"""Of the prior slope, in squared rows."""
_MEMORY = 0.995
_UNUSUAL = 4.0
"""A step that takes so many times what is expected waited for requests, or read a prompt: it does not count."""
RENEW = 32
"""Steps after which the costs that drafters see follow what was learned."""


class StepCosts:
    """Relative costs of steps, by the number of rows."""

    def __init__(self) -> None:
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0
        self._seen = 0
        self._slope = PRIOR
        """Of a row, in steps without any; renewed now and then, so that tables of costs can be shared."""
        self._tables: dict[tuple[int, int], tuple[float, ...]] = {}

    def saw(self, rows: int, seconds: float) -> None:
        """A step over ``rows`` rows took ``seconds``."""
        if self._count and seconds > _UNUSUAL * self._expected(rows):
            self._seen += 1
            if self._seen < RENEW:  # so many in a row are usual by now
                return
            self._count = self._rows = self._seconds = self._squares = self._products = 0.0
        self._seen = 0
        self._count = self._count * _MEMORY + 1.0
        self._rows = self._rows * _MEMORY + rows
        self._seconds = self._seconds * _MEMORY + seconds
        self._squares = self._squares * _MEMORY + rows * rows
        self._products = self._products * _MEMORY + rows * seconds

    def renew(self) -> None:
        """Let :meth:`relative` follow what was seen."""
        slope, base = self._line()
        self._slope = slope / base if base > 0.0 else PRIOR
        self._tables.clear()

    def relative(self, others: int, most: int) -> tuple[float, ...]:
        """Costs of a step with 0 to ``most`` draft rows beside ``others`` rows, in steps with those alone."""
        found = self._tables.get((others, most))
        if found is None:
            base = 1.0 + self._slope * others
            found = tuple((base + self._slope * count) / base for count in range(most + 1))
            self._tables[others, most] = found
        return found

    def _expected(self, rows: int) -> float:
        slope, base = self._line()
        return max(base + slope * rows, self._seconds / self._count)

    def _line(self) -> tuple[float, float]:
        """Seconds of a row, and of a step without any."""
        if not self._count:
            return PRIOR, 1.0
        mean_rows, mean = self._rows / self._count, self._seconds / self._count
        spread = self._squares - self._count * mean_rows * mean_rows
        joint = self._products - self._count * mean_rows * mean
        prior = PRIOR * mean / (1.0 + PRIOR * mean_rows)
        slope = max(0.0, (joint + _PRIOR_WEIGHT * prior) / (spread + _PRIOR_WEIGHT))
        slope = min(slope, mean / max(mean_rows, 1.0))
        return slope, max(mean - slope * mean_rows, 0.05 * mean)

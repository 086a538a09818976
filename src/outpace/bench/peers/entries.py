"""One row of a comparison: a library in one configuration, and what it answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outpace.bench.statistics import Rate, total_rate


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as every process gets it."""

    id: str
    category: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process reported: ``first`` tokens came together, first of all, and ``seconds`` are those after them."""

    tokens: tuple[int, ...]
    first: int
    ttft_ms: float
    seconds: float
    memory_mb: float | None

    @property
    def rate(self) -> Rate:
        """(tokens after those that came first, seconds after these)."""
        return len(self.tokens) - self.first, self.seconds


@dataclass(eq=False, slots=True)
class Entry:
    """A row. ``error`` ends its part in the run; what it answered before stays.

    ``weights``: the GGUF format that it was given instead of the file's own. ``note``: what else a reader should know.
    """

    name: str
    config: str
    ours: bool
    precision: str | None = None
    weights: str | None = None
    version: str | None = None
    error: str | None = None
    note: str | None = None
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name on one line, no other row's: those of outpace differ by precision, others by the file's format."""
        return " ".join(filter(None, (self.name, self.config, self.precision if self.ours else self.weights)))

    def rates(self, ids: Iterable[str]) -> list[Rate]:
        return [self.answers[one].rate for one in ids if one in self.answers]

    def decode_rate(self, ids: Iterable[str]) -> float | None:
        """Tokens per second after those that arrive first, over these prompts; None where it answered none."""
        return total_rate(self.rates(ids))

"""What rounds with a learned drafter yield per time, and when to ask it again: the decision of ``auto``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

PRIOR_TOKENS = 2.0
"""Tokens that a round with the learned part is expected to commit before any was seen."""
PRIOR_COST = 1.3
"""What such a round's forward is expected to cost, in autoregressive steps."""
PRIOR_ROUNDS = 2.0
"""How many rounds this expectation counts for, at first."""
FADE = 0.95
"""What a round still weighs after the next one with the learned part; the expectation fades with them."""
MARGIN = 1.05
"""How much better rounds with the learned part must have been than one without promises to be."""
PATIENCE, MOST_PATIENCE = 8, 64
"""Rounds without the learned part after which it is tried again: at first, and at most. A trial without gain
doubles them, one that does halves them and is followed by another at once."""
_CLOCKED = 9


@dataclass(slots=True)
class Yield:
    """What rounds with the learned part have brought, newer ones counting more, and when to ask for the next."""

    tokens: float = 0.0
    steps: float = 0.0
    expected: float = PRIOR_ROUNDS
    """Rounds that the expectation counts for."""
    waited: int = 0
    patience: int = PATIENCE
    again: bool = False
    trial: float = 0.0
    """In a round that tries it against expectation: the rate to be beaten."""

    def rate(self, draft: float) -> float:
        """Tokens per autoregressive step's time of a round whose draft takes ``draft`` autoregressive steps."""
        tokens = self.tokens + self.expected * PRIOR_TOKENS
        return tokens / (self.steps + self.expected * (PRIOR_COST + draft))

    def wanted(self, alone: float, draft: float) -> bool:
        """Whether to ask the learned part, where the rate without it would be ``alone``. To be asked once a round."""
        self.trial = 0.0
        if self.rate(draft) > MARGIN * alone:
            self.waited, self.patience = 0, PATIENCE
            return True
        self.waited += 1
        if self.waited <= self.patience and not self.again:
            return False
        self.waited, self.again, self.trial = 0, False, alone
        return True

    def learn(self, tokens: int, steps: float) -> None:
        """A round with the learned part committed ``tokens`` in ``steps``, its draft included."""
        weight = FADE
        if self.trial:
            self.again = tokens > self.trial * steps
            self.patience = max(PATIENCE, self.patience // 2) if self.again else min(2 * self.patience, MOST_PATIENCE)
            weight = 0.5 if self.again else FADE  # what was known is out of date
        self.tokens = weight * self.tokens + tokens
        self.steps = weight * self.steps + steps
        self.expected *= weight


class Clock:
    """How long the learned part drafts, by how many sequences together; the median of the last times."""

    def __init__(self) -> None:
        self._spent: dict[int, deque[float]] = {}

    def read(self, count: int, seconds: float) -> None:
        """A draft for ``count`` sequences took ``seconds``."""
        self._spent.setdefault(count.bit_length(), deque(maxlen=_CLOCKED)).append(seconds)

    def seconds(self, count: int) -> float | None:
        """What a draft for ``count`` sequences takes; None where none was timed."""
        spent = self._spent.get(count.bit_length())
        return median(spent) if spent else None

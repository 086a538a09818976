"""What rounds with a learned drafter yield per time, and when to ask it again: the decision of ``auto``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

PRIOR_TOKENS = 1.0
"""Tokens that the learned part is expected to add to a round before any were seen."""
PRIOR_COST = 0.3
"""What its draft tokens are expected to add to such a round's forward, in autoregressive steps."""
PRIOR_ROUNDS = 1.0
"""How many rounds this expectation counts for, at first."""
FADE = 0.95
"""What a round still weighs after the next one with the learned part; the expectation fades with them."""
MARGIN = 1.05
"""How much better rounds with the learned part must have been than one without promises to be."""
PATIENCE, MOST_PATIENCE = 8, 64
"""Rounds without the learned part after which it is tried again: at first, and at most. A trial without gain
doubles them, one that does halves them and is followed by another at once."""
LONGEST_REST = 1024
"""Most rounds, of all requests together, between trials of a part that has added nothing to any of them."""
_JUDGED = 2
_CLOCKED = 9


class Round(NamedTuple):
    """A round by what it commits: ``tokens`` in ``steps`` autoregressive steps."""

    tokens: float
    steps: float

    @property
    def rate(self) -> float:
        """Tokens per autoregressive step's time."""
        return self.tokens / self.steps


_AUTOREGRESSIVE = Round(1.0, 1.0)


@dataclass(slots=True)
class Standing:
    """Whether a learned part gains anything, from all greedy requests of a process: counts of rounds and trials, and
    nothing of what they were about.

    ``failures``: in how many cases in a row it has not. ``rested``: rounds of all requests since the last case.
    """

    failures: int = 0
    rested: int = 0

    @property
    def poor(self) -> bool:
        """Whether it has failed more than once: then requests begin without it."""
        return self.failures > 1

    @property
    def rests(self) -> bool:
        """Whether it is not to be tried yet."""
        return self.poor and self.rested < min(PATIENCE << min(self.failures - 1, 16), LONGEST_REST)

    def judge(self, gained: bool) -> None:
        """A request has left it out, or tried it again."""
        self.failures = self.failures // 2 if gained else self.failures + 1
        self.rested = 0


@dataclass(slots=True)
class Yield:
    """What the learned part has added to rounds, newer ones counting more, and when to ask for it.

    A round's tokens and time without it are known too: the free part's draft shows what it would have brought alone. So
    neither is credited with the other's. ``standing``: what other requests saw of it; None where that must not matter.
    ``tokens`` and ``steps``: what it has added to ``weight`` rounds.
    """

    standing: Standing | None = None
    tokens: float = 0.0
    steps: float = 0.0
    weight: float = 0.0
    expected: float = PRIOR_ROUNDS
    """Rounds that the expectation counts for."""
    waited: int = 0
    patience: int = PATIENCE
    again: bool = False
    asked: bool = False
    """Whether it was asked in the round before, for its rate."""
    trial: bool = False
    """Whether the round under way tries it against expectation."""
    judged: int = 0
    """How often ``standing`` was told of no gain: one request, however long, is not all there is."""

    def __post_init__(self) -> None:
        if self.standing is not None and self.standing.poor:
            self.expected, self.waited = 0.0, self.patience

    def rate(self, alone: Round, draft: float) -> float:
        """Tokens per autoregressive step's time of the round ``alone`` with a learned draft that takes ``draft``."""
        rounds = self.weight + self.expected
        if not rounds:
            return 0.0
        tokens = (self.tokens + self.expected * PRIOR_TOKENS) / rounds
        steps = (self.steps + self.expected * (PRIOR_COST + draft)) / rounds
        return (alone.tokens + tokens) / (alone.steps + max(0.0, steps))  # a draft never makes a round quicker

    def wanted(self, alone: Round, draft: float) -> bool:
        """Whether to ask the learned part, in a round that would be ``alone`` without it. To be asked once a round."""
        asked, self.asked, self.trial = self.asked, False, False
        if self.standing is not None:
            self.standing.rested += 1
        if self.rate(alone, draft) > MARGIN * alone.rate:
            self.waited, self.patience, self.asked = 0, PATIENCE, True
            return True
        if asked and self.rate(_AUTOREGRESSIVE, draft) <= MARGIN:  # not only because copying promises more just now
            self._judge(gained=False)
        self.waited += 1
        rests = self.standing is not None and self.standing.rests
        if not self.again and (self.waited <= self.patience or rests):
            return False
        self.waited, self.again, self.trial = 0, False, True
        return True

    def learn(self, alone: Round, found: Round) -> None:
        """A round with the learned part was ``found``, its draft included, and would have been ``alone`` without it."""
        weight = FADE
        if self.trial:
            self.again = found.tokens > alone.tokens and found.rate > alone.rate
            self.patience = max(PATIENCE, self.patience // 2) if self.again else min(2 * self.patience, MOST_PATIENCE)
            weight = 0.5 if self.again else FADE  # what was known is out of date
            self._judge(gained=self.again)
        self.tokens = weight * self.tokens + found.tokens - alone.tokens
        self.steps = weight * self.steps + found.steps - alone.steps
        self.weight = weight * self.weight + 1.0
        self.expected *= weight

    def _judge(self, gained: bool) -> None:
        if self.standing is None or (not gained and self.judged >= _JUDGED):
            return
        self.judged += not gained
        self.standing.judge(gained)


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

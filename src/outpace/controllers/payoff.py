"""Whether rounds of several requests are worth drafting for, as their tokens per second show with drafts and without.

Costs that are known beforehand do not hold everything that drafting takes in a batch: looking for drafts takes time in
rounds that find none, and the requests that find some have longer contexts than the others (LOG.md). A prediction that
is wrong by a tenth is harmless for one request, which gains a half; for eight it decides between a gain and a loss. So
batches are measured: rounds with drafts and rounds without, one after the other, and the better goes on until both are
compared again: the later, the more the other would lose meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

BEGINNING, TRIAL, REFERENCE = 32, 16, 8
"""Rounds with drafts at first, and when they are tried again; rounds without any that they are compared with."""
SOON, LATE = 32, 4096
"""Rounds from one comparison to the next, at least and at most."""
EXPLORING = 0.01
"""Share of the time that comparisons may cost, which decides how many rounds lie between them: the worse of the two is
tried again soon where it is nearly as good."""
MARGIN = 1.01
"""Rounds with drafts must commit so many times the tokens per second of those without."""
_KEPT = 64
"""The last rounds with drafts that a comparison counts; after as many, what was found before weighs half."""
_TRIALS = 4
"""Trials in a row, while they go better than all rounds before them."""
_OUTLIER = 3.0
"""A round that takes so many times the median beside its draft was held up by something else, and counts as the median.
The draft counts as it is but for prompts that it reads first: see :meth:`Payoff._drafting`."""


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A round with drafts: tokens for each request, seconds beside the draft's, those of the draft, and the share of
    requests that the drafter had not read before."""

    tokens: float
    rest: float
    drafting: float
    unread: float


class Payoff:
    """One drafter's, in batches of about one size.

    ``drafts``: whether the next round is to draft. Every round is told to :meth:`saw`. ``like``: what is known of the
    size next to this one, with whose answer this one begins.
    """

    def __init__(self, like: Payoff | None = None) -> None:
        self.better: bool = like is None or like.better
        """Whether drafting went better when it was compared last."""
        self.drafts = self.better
        self._left, self._trials = BEGINNING, 0
        self._drafted = deque[_Drafted](maxlen=_KEPT)
        """The rounds with drafts since the last comparison."""
        self._plain = deque[float](maxlen=REFERENCE)
        """Seconds of the last rounds without."""
        self._tokens = self._steps = 0.0
        """Of all rounds with drafts, the later ones more; steps of a round without any."""
        self._joined = self._rounds = 0.0
        """Of all rounds: the requests that joined, as shares of a batch, and how many rounds."""
        self._rested = False
        """Whether the last round had no drafts, so that drafters have not read what the requests hold."""

    def saw(self, tokens: float, seconds: float, drafting: float = 0.0, joined: float = 0.0) -> None:
        """The round that :attr:`drafts` was read for has committed ``tokens`` for each request and took ``seconds``, of
        which ``drafting`` for its draft. ``joined``: the share of requests whose first round it was."""
        self._joined, self._rounds = self._joined + joined, self._rounds + 1.0
        if self.drafts:
            self._drafted.append(_Drafted(tokens, seconds - drafting, drafting, 1.0 if self._rested else joined))
        else:
            self._plain.append(seconds)
        self._rested = not self.drafts
        self._left -= 1
        if self._left > 0:
            return
        if self.drafts is self.better:  # a while of the other, to compare with
            self.drafts = not self.better
            self._left = TRIAL if self.drafts else REFERENCE
        else:
            self._compare()

    def _compare(self) -> None:
        step = median(self._plain)
        usual = median(one.rest for one in self._drafted)
        tokens = sum(one.tokens for one in self._drafted)
        steps = sum(usual if one.rest > _OUTLIER * usual else one.rest for one in self._drafted) / step
        steps += self._drafting() / step
        fade = 0.5 ** (len(self._drafted) / _KEPT)
        self._tokens, self._steps = fade * self._tokens + tokens, fade * self._steps + steps
        self._drafted.clear()
        better = self._tokens > MARGIN * self._steps
        if not better and not self.better and tokens > MARGIN * steps and self._trials < _TRIALS:
            self._trials, self._left = self._trials + 1, TRIAL
            return
        lost = (self._tokens / self._steps - 1.0) * REFERENCE if better else steps - tokens
        self.better, self._trials = better, 0
        self.drafts, self._left = better, min(LATE, max(SOON, round(lost / EXPLORING)))

    def _drafting(self) -> float:
        """Seconds that the drafts would have taken in rounds that always draft.

        The first draft after a rest reads what all requests hold, in a trial of a few rounds; where every round drafts,
        a request's is read once, when it joins. So of what such a draft takes longer than others, a share counts.
        """
        total = sum(one.drafting for one in self._drafted)
        others = [one.drafting for one in self._drafted if not one.unread]
        unread = sum(one.unread for one in self._drafted)
        if not others or not unread:
            return total
        usual = median(others)
        share = min(1.0, self._joined / self._rounds * len(self._drafted) / unread)
        reading = sum(max(0.0, one.drafting - usual) for one in self._drafted if one.unread)
        return total - (1.0 - share) * reading

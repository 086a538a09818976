"""Whether rounds of several requests are worth drafting for, as their tokens per second show with drafts and without.

Costs that are known beforehand do not hold everything that drafting takes in a batch: looking for drafts takes time in
rounds that find none, and the requests that find some have longer contexts than the others (LOG.md). A prediction that
is wrong by a tenth is harmless for one request, which gains a half; for eight it decides between a gain and a loss. So
batches are measured. Two things are, and they change at different speeds:

- What a round with drafts takes beside one without, over what the costs say: a property of the drafter and the machine.
  It is timed where rounds of both kinds follow one another, because a machine with other users changes its speed by a
  fifth within a second; the median of the last such places counts.
- How many tokens rounds with drafts commit: a property of the texts, which change with every request. The last rounds
  with drafts show it. Where they are few, their spread is added: a few rounds decide against drafts only if they are
  far too low.

Where drafts do not pay, a few rounds try them again, the sooner the less such a trial costs; one that looks well goes
on, as long as it does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median

FIRST_RUN, TRIAL, REFERENCE = 8, 4, 2
"""Rounds of a run: with drafts at first, with drafts when they are tried again, and without drafts beside them."""
TURNS = 3
"""First runs, each with rounds without drafts after it, before anything is decided."""
SOON, LATE = 16, 4096
"""Rounds from one trial to the next, at least and at most."""
EXPLORING = 0.01
"""Share of the time that trials may cost, which decides how many rounds lie between them."""
REFERRING = 0.005
"""Share of the time that rounds without drafts may cost while drafts pay."""
OFTEN, SELDOM = 64, 256
"""Rounds with drafts from one reference to the next, at least and at most."""
MARGIN = 1.02
"""Rounds with drafts must commit so many times the tokens per second of those without."""
CONFIDENCE = 1.0
"""Standard errors by which the tokens of rounds with drafts may fall short."""
_KEPT, _KEPT_FOR_TRIAL = 48, 12
"""The last rounds with drafts that tell how many tokens such rounds have: at most, and when they are tried again."""
_PLACES = 7
"""The last places where rounds of both kinds were timed beside each other."""
_OUTLIER = 3.0
"""A round that takes so many times the median beside its draft was held up by something else, and counts as the median.
The draft counts as it is but for prompts that it reads first: see :meth:`Payoff._drafting`."""
_LEAST_GAIN = 0.01
"""What drafts that hardly pay are taken to gain when their next reference is planned."""


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A round with drafts: tokens for each request, seconds beside the draft's, those of the draft, the share of
    requests that the drafter had not read before, and the steps that costs expected beside the draft."""

    tokens: float
    rest: float
    drafting: float
    unread: float
    expected: float

    @property
    def step(self) -> float:
        """Seconds of a step, as this round had it."""
        return self.rest / self.expected


class Payoff:
    """One drafter's, in batches of about one size.

    ``drafts``: whether the next round is to draft. Every round is told to :meth:`saw`. ``like``: what is known of the
    size next to this one, with whose answer this one begins. ``clocked``: whether it is told what rounds have taken;
    else what costs expect of them, so that rounds without drafts show nothing.
    """

    def __init__(self, like: Payoff | None = None, *, clocked: bool = True) -> None:
        self.clocked = clocked
        self.better: bool = like is None or like.better
        """Whether drafts pay, as far as is known."""
        self.drafts = self.better
        self._drafted = deque[_Drafted](maxlen=_KEPT)
        """The last rounds with drafts."""
        self._corrections: deque[float] = deque(maxlen=_PLACES) if like is None else like._corrections.copy()
        """What rounds with drafts took beside those without, over what costs expected, where both were timed."""
        self._joined = self._rounds = 0.0
        """Of all rounds: the requests that joined, as shares of a batch, and how many rounds."""
        self._unread = 0.0
        """The share of requests of which drafters have not read the prompt, or a long part."""
        self._run: list[_Drafted] = []
        """Rounds with drafts since the last ones without."""
        self._before: list[float] = []
        """Seconds of the rounds without drafts before that run."""
        self._plain: list[float] = []
        """Those since."""
        self._references = 0
        """Times that rounds without drafts followed others while those paid."""
        self._reading = 0.0
        """Steps that the last trial took to read what had come since the one before."""
        self._rounds_left = (FIRST_RUN if clocked else TURNS * FIRST_RUN) if self.better else SOON
        """Rounds of this kind that are left."""

    @property
    def idle(self) -> int:
        """How many rounds without drafts follow the next one."""
        return 0 if self.drafts else max(0, self._rounds_left - 1)

    def saw(
        self, tokens: float, seconds: float, drafting: float = 0.0, joined: float = 0.0, expected: float = 1.0
    ) -> None:
        """The round that :attr:`drafts` was read for has committed ``tokens`` for each request and took ``seconds``, or
        without a clock autoregressive steps, of which ``drafting`` for its draft. ``joined``: the share of requests
        whose first round it was. ``expected``: the autoregressive steps that a round with its rows takes beside the
        draft, by the costs."""
        self._joined, self._rounds = self._joined + joined, self._rounds + 1.0
        self._unread = min(1.0, self._unread + joined)
        self._rounds_left -= 1
        if self.drafts:
            self._saw_draft(_Drafted(tokens, seconds - drafting, drafting, self._unread, expected))
        else:
            self._saw_plain(seconds)

    def _saw_draft(self, one: _Drafted) -> None:
        self._unread = 0.0
        self._drafted.append(one)
        self._run.append(one)
        over = self._rounds_left <= 0
        if over and not self.clocked:
            self._references = TURNS
        if not self._decided:  # its costs are not known yet
            if over:
                self._rest(REFERENCE)
        elif over or len(self._run) % TRIAL == 0:
            if not self._pays():
                self.better = False
                self._rest(self._until_trial())
            elif not self.better:
                self.better, self._references = True, TURNS
                self._rounds_left = self._until_reference()
            elif over and self.clocked:
                self._rest(REFERENCE)
            elif over:
                self._draft(OFTEN)

    def _saw_plain(self, seconds: float) -> None:
        if not self.better:
            self._unread = 1.0
        self._plain.append(seconds)
        if len(self._plain) == REFERENCE and self._run:
            self._compare()
        if self._rounds_left > 0:
            return
        if not self.better:
            while len(self._drafted) > _KEPT_FOR_TRIAL:
                self._drafted.popleft()
            self._draft(TRIAL)
            return
        self._references += 1
        if self._decided and not self._pays():
            self.better, self._rounds_left = False, self._until_trial()
        else:
            self._draft(self._until_reference() if self._decided else FIRST_RUN)

    @property
    def _decided(self) -> bool:
        """Whether it is known what drafts take."""
        return not self.better or self._references >= TURNS

    def _draft(self, rounds: int) -> None:
        self.drafts, self._rounds_left = True, rounds
        self._before, self._plain, self._run = self._plain[-REFERENCE:], [], []

    def _rest(self, rounds: int) -> None:
        self.drafts, self._rounds_left = False, rounds

    def _compare(self) -> None:
        """The run of drafts that has ended beside the rounds without around it."""
        near = self._run[-FIRST_RUN:]
        beside = self._plain + (self._before if len(self._run) <= FIRST_RUN else [])
        self._corrections.append(self._rest_of(near) / sum(one.expected for one in near) / median(beside))
        self._run = []

    @staticmethod
    def _rest_of(rounds: list[_Drafted]) -> float:
        """Seconds beside their drafts, without what held single ones up."""
        usual = median(one.step for one in rounds)
        return sum((usual if one.step > _OUTLIER * usual else one.step) * one.expected for one in rounds)

    @property
    def _tokens(self) -> float:
        """Of a round with drafts, for each request."""
        return fmean(one.tokens for one in self._drafted)

    @property
    def _steps(self) -> float:
        """Rounds without drafts that one with drafts takes. The draft stands beside the rest of its own round, whatever
        the machine's speed was then."""
        rounds = list(self._drafted)
        correction = median(self._corrections) if self._corrections else 1.0
        beside = correction * fmean(one.expected for one in rounds)
        return beside * (1.0 + self._drafting() / self._rest_of(rounds))

    def _pays(self) -> bool:
        """Whether the last drafts may pay."""
        count, tokens = len(self._drafted), self._tokens
        variance = sum((one.tokens - tokens) ** 2 for one in self._drafted) / max(1, count - 1)
        return tokens + CONFIDENCE * sqrt(variance / count) > MARGIN * self._steps

    def _until_trial(self) -> int:
        before, self._reading = self._reading, self._steps_of_reading()
        # What held up a single trial is not what the next one reads.
        cost = TRIAL * max(0.0, self._steps - self._tokens) + min(before, self._reading)
        return min(LATE, max(SOON, round(cost / EXPLORING)))

    def _steps_of_reading(self) -> float:
        """What the first drafts of the run had to read, beside its other drafts."""
        run = self._run[:TRIAL]
        if not run:
            return 0.0
        usual = median(one.drafting for one in run)
        return sum(max(0.0, one.drafting - usual) for one in run) / median(one.step for one in run)

    def _until_reference(self) -> int:
        gain = max(_LEAST_GAIN, self._tokens / self._steps - 1.0)
        return min(SELDOM, max(OFTEN, round(REFERENCE * gain / REFERRING)))

    def _drafting(self) -> float:
        """Seconds that the last drafts would have taken in rounds that always draft.

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

"""Whether rounds of several requests are worth drafting for, as their tokens per second show with drafts and without.

Costs that are known beforehand do not hold everything that drafting takes in a batch: looking for drafts takes time in
rounds that find none, and the requests that find some have longer contexts than the others (LOG.md). A prediction that
is wrong by a tenth is harmless for one request, which gains a half; for eight it decides between a gain and a loss. So
batches are measured: rounds with drafts and rounds without by turns, and the better goes on until both are compared
again: the later, the more the other would lose meanwhile. Where drafts suddenly bring so few tokens that they would no
longer pay, both are compared sooner.

The turns of a comparison are short, and each run of drafts stands against the rounds beside it, because a machine with
other users changes its speed by a fifth within a second: half a second of the one after half a second of the other once
gave drafts up that gained a third (LOG.md).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

TURNS = 4
"""Runs of drafts in a comparison, each followed by :data:`REFERENCE` rounds without."""
BEGINNING, TRIAL, REFERENCE = 8, 4, 2
"""Rounds of a run: with drafts, at first and when they are compared again, and without."""
SOON, LATE = 32, 4096
"""Rounds from one comparison to the next, at least and at most."""
EXPLORING = 0.01
"""Share of the time that comparisons may cost, which decides how many rounds lie between them: the worse of the two is
tried again soon where it is nearly as good."""
MARGIN = 1.01
"""Rounds with drafts must commit so many times the tokens per second of those without."""
_KEPT = 64
"""The last rounds with drafts whose tokens a comparison counts; after as many, what was found before weighs half."""
_TRIALS = 3
"""Comparisons that follow one another at once while drafts nearly pay: drafters learn from their drafts, so that the
first rounds, and those after a rest, have fewer accepted tokens than later ones."""
_NEARLY = 0.93
"""Tokens per second of the rounds of a comparison, in those without drafts, from which drafts nearly pay."""
_RECENT = 32
"""Rounds with drafts that tell, by how few tokens they have, that other texts have come under which drafts no longer
pay."""
_CHANGED = 0.25
"""What was found before weighs so much then."""
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


def _without_stall(seconds: float, usual: float) -> float:
    """A round's seconds, or the usual ones where something else held it up."""
    return usual if seconds > _OUTLIER * usual else seconds


@dataclass(slots=True)
class _Run:
    """Seconds of rounds with drafts, the draft's apart, and of those without that follow them."""

    drafted: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)


class Payoff:
    """One drafter's, in batches of about one size.

    ``drafts``: whether the next round is to draft. Every round is told to :meth:`saw`. ``like``: what is known of the
    size next to this one, with whose answer this one begins.
    """

    def __init__(self, like: Payoff | None = None) -> None:
        self.better: bool = like is None or like.better
        """Whether drafting went better when it was compared last."""
        self.drafts = self.better
        self._trials, self._lost = 0, 0.0
        """Comparisons in a row, and what all of them have cost, in rounds without drafts."""
        self._drafted = deque[_Drafted](maxlen=_KEPT)
        """The rounds with drafts since the last comparison."""
        self._tokens = self._steps = 0.0
        """Of all rounds with drafts, the later ones more; steps of a round without any."""
        self._joined = self._rounds = 0.0
        """Of all rounds: the requests that joined, as shares of a batch, and how many rounds."""
        self._unread = 0.0
        """The share of requests of which drafters have not read the prompt, or a long part."""
        self._least_tokens = 0.0
        """Of a round with drafts, for them to pay, when both were compared last."""
        self._changed = False
        """Whether what was found before the comparison under way no longer counts."""
        self._paid = 0
        """Rounds for which drafts have paid."""
        self._longest_wait = LATE
        """Rounds until the next comparison at most: texts under which drafts paid for a while may come again, and what
        has changed after a while is taken to change again after as long."""
        self._runs = list[_Run]()
        """Of the comparison under way; empty between two."""
        self._rounds_left = 0
        """Rounds of this kind that are left: of the run, or until the next comparison."""
        self._run_length = BEGINNING if self.better else TRIAL
        if self.better:
            self._compare_from_now()
        else:
            self._go_on(SOON)

    def saw(self, tokens: float, seconds: float, drafting: float = 0.0, joined: float = 0.0) -> None:
        """The round that :attr:`drafts` was read for has committed ``tokens`` for each request and took ``seconds``, of
        which ``drafting`` for its draft. ``joined``: the share of requests whose first round it was."""
        self._joined, self._rounds = self._joined + joined, self._rounds + 1.0
        self._paid += self.better
        self._unread = min(1.0, self._unread + joined)
        if self.drafts:
            self._drafted.append(_Drafted(tokens, seconds - drafting, drafting, self._unread))
            self._unread = 0.0
        elif not self._runs:
            self._unread = 1.0
        if self._runs:
            (self._runs[-1].drafted if self.drafts else self._runs[-1].plain).append(seconds - drafting)
        self._rounds_left -= 1
        if self._rounds_left > 0 and not self._pays_no_more():
            return
        if not self._runs:
            self._compare_from_now()
        elif self.drafts:
            self.drafts, self._rounds_left = False, REFERENCE
        elif len(self._runs) < TURNS:
            self._begin_run()
        else:
            self._compare()

    def _pays_no_more(self) -> bool:
        """Whether drafts go on and the last ones brought fewer tokens than they need by the last comparison."""
        if self._runs or not self.drafts or len(self._drafted) < _RECENT or self._rounds_left % (_RECENT // 2):
            return False
        # Tokens alone: seconds have changed with the machine, the contexts and the number of requests.
        if fmean(one.tokens for one in list(self._drafted)[-_RECENT:]) >= self._least_tokens:
            return False
        self._changed = True
        self._drafted.clear()  # those that were chosen for being few do not decide
        return True

    def _compare_from_now(self) -> None:
        self._runs.clear()
        self._begin_run()

    def _begin_run(self) -> None:
        self._runs.append(_Run())
        self.drafts, self._rounds_left = True, self._run_length

    def _go_on(self, rounds: int) -> None:
        """With the better one, for so many rounds."""
        self._runs.clear()
        self.drafts, self._rounds_left = self.better, rounds

    def _compare(self) -> None:
        count, tokens = len(self._drafted), sum(one.tokens for one in self._drafted)
        usual = median(one.rest for one in self._drafted)
        rest = sum(_without_stall(one.rest, usual) for one in self._drafted)
        # The draft beside the rest of its own round, whatever the machine's speed was then.
        steps = count * self._steps_of_rest() * (1.0 + self._drafting() / rest)
        self._least_tokens = MARGIN * steps / count
        if self._changed:
            self._longest_wait = max(SOON, 2 * self._paid)
        fade = _CHANGED if self._changed else 0.5 ** (count / _KEPT)
        self._changed = False
        self._tokens, self._steps = fade * self._tokens + tokens, fade * self._steps + steps
        self._drafted.clear()
        self._run_length = TRIAL
        better = self._tokens > MARGIN * self._steps
        self._lost += TURNS * REFERENCE * (self._tokens / self._steps - 1.0) if better else steps - tokens
        if not better and tokens > _NEARLY * steps and self._trials < _TRIALS:
            self._trials += 1
            self._compare_from_now()
            return
        wait = min(self._longest_wait, max(SOON, round(self._lost / EXPLORING)))
        if not better:
            self._paid = 0
        self.better, self._trials, self._lost, self._longest_wait = better, 0, 0.0, LATE
        self._go_on(wait)

    def _steps_of_rest(self) -> float:
        """How many rounds without drafts one with drafts takes, its draft apart: the median of the runs, each beside
        the rounds before and after it."""
        usual = median(took for run in self._runs for took in run.drafted)
        ratios, before = list[float](), list[float]()
        for run in self._runs:
            ratios.append(fmean(_without_stall(took, usual) for took in run.drafted) / median(before + run.plain))
            before = run.plain
        return median(ratios)

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

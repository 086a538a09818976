"""What asking a learned drafter is expected to add to a round, and when it is tried against expectation.

The estimate is made of its last drafts (:class:`Yield`): how likely its draft tokens said that they were, corrected by
how many more tokens the rounds have committed than they would have without it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

PRIOR = (0.45, 0.2, 0.13, 0.1, 0.07, 0.05)
"""How likely the draft tokens of a learned drafter are accepted before any were seen, the likeliest first."""
RECENT = 8
"""Drafts of a request that its estimate is the mean of, nearly."""
RECENT_OF_ALL = 256
ROUNDS_OF_ALL = 128
"""Rounds, of requests with texts of about one length, that the share of those with a draft is the mean of, nearly."""
LOOKS, OPTIMISM = 4, 1.0
"""So many drafts of a request are asked for as if they added more than expected: the first by this share, the next ones
by a half, a third and a quarter of it: it looks. Where a draft is not worth its time on average, it is for the requests
that the drafter suits. Their first drafts show that, and other requests lose the time of a draft or two."""
FOLLOWED, LOOK_AGAIN = 0.13, 8
"""Where fewer than this share of the rounds after the first drafts ask for another one, only one request of so many
looks. Four drafts that do not pay lose about what four that do gain, and an answer has thirty rounds."""
CHEAP = 0.4
"""Autoregressive steps of a draft for which that holds. One that takes more must be followed more often, in proportion:
a draft that does not pay loses all of its time."""
PACE = 1.25
"""Tokens per autoregressive step before any round was seen."""
OF_A_REQUEST, ROUNDS_OF_LOOKS = 24, 256
"""So many rounds of a request count at most, since those of one answer agree; and the share is of so many, nearly."""
WEIGHT, PROVEN = 4.0, 12.0
"""The correction that a request begins with counts as this many promised tokens; of a drafter that was measured to make
decoding faster, as more."""
ODDS, MOST_ODDS, LONG_ODDS = 9.0, 20.0, 1e4
"""Odds that a drafter is as good as its probabilities say, and not one whose tokens are accepted by chance alone:
before any draft was seen, at most by the last drafts, and at most by all."""
CHANCE, SURE = 0.03, 0.8
"""How often the first token of a drafter that is worth nothing is accepted, and of one that is worth most."""
GAINING = 0.2
"""Tokens that a trial has to add."""
LARGEST = 10
"""Draft tokens of a profile: those beyond are unlikely."""
RELAX = 0.07
"""How far, in a round without a draft, what the last drafts have shown gives way to what all have."""
FADE = 0.95
"""What a draft still weighs in the correction after the next one."""
MOST_CORRECTION = 1.5
PATIENCE, MOST_PATIENCE = 16, 256
"""Rounds without the learned drafter after which it is tried again: at first, and at most. A trial without gain doubles
them, one that gains halves them and is followed by another at once."""
SELDOM = 4
"""Rounds from one attempt at a trial to the next."""
SHORT = 256
"""Tokens of a text up to which it is short; each further class of lengths ends at four times the one before."""
LONGEST_REST = 1024
"""Most rounds, of all requests together, between trials of a drafter that has added nothing to any of them."""


@dataclass(slots=True)
class _Record:
    """What drafts promised, and what they added. ``profile[n]``: mean probability of the n-th likeliest draft token, of
    the last ``recent`` drafts, 0 where a draft has fewer; ``shares[n]``: how many have it. ``usual``, ``odds``: the
    correction, and the odds that the drafter is worth anything."""

    recent: int
    profile: list[float] = field(default_factory=lambda: list(PRIOR))
    shares: list[float] = field(default_factory=lambda: [1.0] * len(PRIOR))
    usual: float = 1.0
    odds: float = ODDS
    weight: float = WEIGHT
    drafts: int = 2
    promised: float = 0.0
    added: float = 0.0

    @property
    def correction(self) -> float:
        """Tokens added for each token that was promised."""
        return min(MOST_CORRECTION, (self.weight * self.usual + self.added) / (self.weight + self.promised))

    @property
    def trust(self) -> float:
        """What a promised token is worth: a drafter that fails in spite of high probabilities is given up soon."""
        return self.correction * min(1.0, self.odds / (1.0 + self.odds) * (1.0 + 1.0 / MOST_ODDS))

    def learn(self, probs: Seq[float], promised: float, added: float, fade: float) -> None:
        self.drafts = min(self.drafts + 1, self.recent)
        further = min(len(probs), LARGEST) - len(self.profile)
        self.profile += [0.0] * further
        self.shares += [0.0] * further
        for at, known in enumerate(self.profile):
            drafted = at < len(probs)
            self.profile[at] += ((probs[at] if drafted else 0.0) - known) / self.drafts
            self.shares[at] += (drafted - self.shares[at]) / self.drafts
        share = 1.0 / max(1.0, promised)  # tokens of one path fail together: a draft tells no more for being long
        self.promised = fade * self.promised + share * promised
        self.added = fade * self.added + share * added
        first = min(probs[0] if probs else 0.0, promised, SURE)
        hit = min(1.0, added)
        likelihood = hit * max(first / CHANCE, 1.0) + (1.0 - hit) * min((1.0 - first) / (1.0 - CHANCE), 1.0)
        most = MOST_ODDS if self.recent == RECENT else LONG_ODDS
        self.odds = min(most, max(1.0 / most, self.odds * likelihood))

    def beginning(self, recent: int) -> _Record:
        """A record of other drafts that begins with what these have shown, and soon goes by its own."""
        return _Record(recent, list(self.profile), list(self.shares), self.correction, within(self.odds), self.weight)

    def relax(self, usual: _Record, rounds: int) -> None:
        """Rounds without a draft: the last ones tell less."""
        stays = (1.0 - RELAX) ** rounds
        goes = 1.0 - stays
        self.promised, self.added = stays * self.promised, stays * self.added
        self.usual = stays * self.usual + goes * usual.correction
        self.odds = self.odds**stays * within(usual.odds) ** goes
        _move(self.profile, usual.profile, goes)
        _move(self.shares, usual.shares, goes)


def _move(own: list[float], to: Seq[float], share: float) -> None:
    """Move numbers by a share of the way to others."""
    own += [0.0] * (len(to) - len(own))
    own[: len(to)] = [(1.0 - share) * one + share * other for one, other in zip(own, to, strict=False)]


def within(odds: float) -> float:
    """The odds that a request begins with."""
    return min(MOST_ODDS, max(1.0 / MOST_ODDS, odds))


def _of_all(proven: bool) -> _Record:
    """What is known of a drafter before any of its drafts was seen."""
    return _Record(RECENT_OF_ALL, odds=MOST_ODDS, weight=PROVEN) if proven else _Record(RECENT_OF_ALL)


@dataclass(slots=True)
class Standing:
    """What a learned drafter adds to the greedy or to the sampled requests of a process whose texts are about as long:
    figures alone, nothing of what they were about.

    ``failures``: trials in a row that did not gain. ``rested``: rounds of all requests since the last one. ``often``:
    the share of the rounds in which the drafter was asked, of requests whose text it had read. ``followed``: in how
    many rounds after a request's first drafts it was asked for more; trials do not count. ``requests``: how many have
    joined before their first draft. ``tokens``, ``steps``: that a round has committed, and autoregressive steps that
    it has taken, of the last ones of all requests. ``proven``: whether it was measured to make decoding faster.
    """

    proven: bool = False
    failures: int = field(default=0, init=False)
    rested: int = field(default=0, init=False)
    often: float = field(default=1.0, init=False)
    followed: float = field(default=0.5, init=False)
    requests: int = field(default=0, init=False)
    tokens: float = field(default=PACE, init=False)
    steps: float = field(default=1.0, init=False)
    record: _Record = field(init=False)

    def __post_init__(self) -> None:
        self.record = _of_all(self.proven)

    @property
    def pace(self) -> float:
        """Tokens per autoregressive step."""
        return self.tokens / self.steps

    def paced(self, tokens: int, steps: float) -> None:
        """A round has committed so many tokens, and taken so many autoregressive steps."""
        self.tokens += (tokens - self.tokens) / ROUNDS_OF_ALL
        self.steps += (steps - self.steps) / ROUNDS_OF_ALL

    @property
    def rests(self) -> bool:
        """Whether it is not to be tried yet."""
        return self.failures > 1 and self.rested < min(PATIENCE << min(self.failures, 16), LONGEST_REST)


class Standings:
    """A learned drafter's standing by the length of the text that a request begins with.

    Heads are trained on short texts and copies come from long ones, so what a head adds to the answer of a question
    says little of what it adds to a summary.
    """

    def __init__(self, *, proven: bool = False) -> None:
        self._proven = proven
        self._known: dict[int, Standing] = {}

    def of(self, tokens: int) -> Standing:
        """That of texts about as long. The first of a length begins with what the next shorter ones have shown, or the
        next longer, where any had a draft."""
        size = (max(0, tokens - 1) // SHORT).bit_length() + 1 >> 1
        found = self._known.get(size)
        if found is None:
            tried = [one for one, standing in self._known.items() if standing.record.promised > 0.0]
            nearest = min(tried, key=lambda one: (one > size, abs(one - size)), default=None)
            found = self._known[size] = Standing(self._proven)
            if nearest is not None:
                found.record = self._known[nearest].record.beginning(RECENT_OF_ALL)
        return found


class Yield:
    """What the learned drafter adds to the rounds of one request, or of a namespace, and when it is tried again.

    ``standing``: what other requests have seen of it, with which this one begins; None where that must not matter.
    ``proven``: whether it was measured to make decoding faster.
    """

    def __init__(self, standing: Standing | None = None, *, proven: bool = False) -> None:
        self.standing: Standing | None = None
        self._all = _of_all(proven)
        """Of all drafts: of other requests too where they may matter, else of this one."""
        self._latest = self._all.beginning(RECENT)
        self._idle = 0
        """Rounds without a draft that it does not know of yet."""
        self.drafts = 0
        self._followed, self._looks_again = 1.0, True
        """What was known when it joined of whether first drafts are followed by more; whether it looks in any case."""
        self._counted = 0
        """Rounds that count as following its first drafts, or not."""
        self.waited, self.patience = 0, PATIENCE
        self._next_attempt = 0
        """Rounds waited at which a trial is attempted next, where one has not come about."""
        self.again = False
        """Whether the last trial has gained, so that another one follows at once."""
        if standing is not None:
            self.join(standing)

    def join(self, standing: Standing) -> None:
        """A request whose text is of another length may join a namespace: what others like it have seen counts now."""
        self._settle()
        self.standing, self._all = standing, standing.record
        if not self.drafts:
            self._latest = self._all.beginning(RECENT)
            self._followed, self._looks_again = standing.followed, standing.requests % LOOK_AGAIN == 0
            standing.requests += 1

    @property
    def _record(self) -> _Record:
        """Of its last drafts."""
        self._settle()
        return self._latest

    def _settle(self) -> None:
        if self._idle:
            self._latest.relax(self._all, self._idle)
            self._idle = 0

    def expected(self, copied: float) -> list[float]:
        """How likely the draft tokens that it would add are accepted, in descending order.

        ``copied``: how likely the free drafter's first draft tokens contain the next token; where they do, the learned
        drafter's add little.
        """
        record = self._record
        scale = record.trust * (1.0 - min(1.0, copied))
        found = [scale * prob for prob in record.profile]
        return found if scale <= 1.0 else [min(1.0, prob) for prob in found]

    def looks(self, steps: float) -> bool:
        """Whether its first drafts, which take ``steps`` autoregressive steps each, are asked for in hope."""
        return self._looks_again or self._followed >= FOLLOWED * max(1.0, steps / CHEAP)

    def hoped(self, copied: float, steps: float) -> list[float]:
        """The same for the decision whether to ask: of the first drafts more than is expected, as requests differ.
        ``steps``: that a draft takes."""
        usual = self.expected(copied)
        if self.drafts >= LOOKS or not self.looks(steps) or not self.hopeful:
            return usual
        scale = 1.0 + OPTIMISM / (1.0 + self.drafts)
        return [min(1.0, scale * prob) for prob in usual]

    @property
    def shares(self) -> Seq[float]:
        """How many of its drafts have each of the tokens that :meth:`expected` speaks of."""
        return self._record.shares

    def at_best(self, copied: float) -> list[float]:
        """The same if it were at least as good as drafters are expected to be: what a trial may find."""
        hoped = [max(prob, known) for prob, known in zip(PRIOR, self._record.profile, strict=False)]
        return [(1.0 - min(1.0, copied)) * prob for prob in hoped]

    @property
    def hopeful(self) -> bool:
        """Whether drafts, of other requests too where they may matter, were better than chance."""
        return self._all.odds > 1.0

    def due(self) -> bool:
        """Whether it is time to try it against expectation; when that round did not suit, not in each that follows."""
        if self.again:
            return True
        return self._late and not (self.standing is not None and self.standing.rests)

    @property
    def _late(self) -> bool:
        return self.waited >= max(self.patience, self._next_attempt)

    @property
    def often(self) -> float:
        """In how many of a request's rounds it is asked, once it has read the text; as a share."""
        return 1.0 if self.standing is None else self.standing.often

    @property
    def pace(self) -> float:
        """Tokens per autoregressive step that requests like this one have had."""
        return PACE if self.standing is None else self.standing.pace

    def paced(self, tokens: int, steps: float) -> None:
        """A round has committed so many tokens, and taken so many autoregressive steps."""
        if self.standing is not None:
            self.standing.paced(tokens, steps)

    def passed(self, *, asked: bool, trial: bool = False, read: bool = False) -> None:
        """A round begins in which it is asked, or not. ``read``: whether it has read the request's text before."""
        if self.standing is not None:
            if read:
                self.standing.often += (asked - self.standing.often) / ROUNDS_OF_ALL
                self._follow(asked=asked, trial=trial)
            self.standing.rested = 0 if trial else self.standing.rested + 1
        if trial:
            self.waited, self._next_attempt, self.again = 0, 0, False
        elif asked:
            self.waited, self._next_attempt, self.patience = 0, 0, PATIENCE
        else:
            if self._late:
                self._next_attempt = self.waited + SELDOM
            self.waited += 1
            self._idle += 1

    def _follow(self, *, asked: bool, trial: bool) -> None:
        """A round after the first draft; while they last, drafts may be asked for in hope, and say nothing."""
        in_hope = asked and self.drafts < LOOKS
        if self.standing is not None and self.drafts and not trial and not in_hope and self._counted < OF_A_REQUEST:
            self._counted += 1
            self.standing.followed += (asked - self.standing.followed) / ROUNDS_OF_LOOKS

    def learn(self, probs: Seq[float], promised: float, added: float, *, trial: bool = False) -> None:
        """A draft whose tokens stated ``probs``, the likeliest first, added ``added`` tokens to its round, or was
        expected to by the target's own distribution; those of it that were scored had promised ``promised``. ``trial``:
        it was asked for against expectation."""
        record, fade = self._record, FADE
        self.drafts += 1
        if trial:
            self.again = added > GAINING
            self.patience = max(PATIENCE, self.patience // 2) if self.again else min(2 * self.patience, MOST_PATIENCE)
            if self.again:  # what was known is out of date
                fade, record.drafts, record.odds = 0.5, 1, max(1.0, record.odds)
        record.learn(probs, promised, added, fade)
        self._all.learn(probs, promised, added, 1.0 - 1.0 / RECENT_OF_ALL)
        if self.standing is not None and trial:
            self.standing.failures = self.standing.failures // 2 if self.again else self.standing.failures + 1

"""What a learned part's drafts take beside a target, in autoregressive steps of the round.

Requests go by what drafts have come to take in this process, greedy ones and sampled ones apart. A sampled answer that
must be the same again for its seed does not depend on that clock: it goes by one rehearsal, kept with the target's
costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from outpace.controllers.base import Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.draft_clock import Aftereffect, Clock
from outpace.controllers.predictor import Predictor
from outpace.controllers.yields import Standings
from outpace.drafting.base import Drafter
from outpace.engine.rehearsal import draft_seconds, recorded_as
from outpace.targets.base import Target

_ROUNDS = 64
"""Rounds after which the share of those that draft is that of the last ones, nearly."""
PATIENCE, LONGEST_REST = 2, 1024
"""A batch decides again after so many rounds for each of these that nobody was asked in; so many at most."""
NOMINAL_DRAFT = 0.25
"""A learned draft's time in autoregressive steps, where costs are fixed."""


@dataclass(slots=True)
class BatchRests:
    """Rounds so far, and the rests of batches by the number of their requests."""

    now: int = 0
    rests: dict[int, BatchRest] = field(default_factory=dict)

    def rest_of(self, batch: int) -> BatchRest:
        """That of batches of so many requests."""
        found = self.rests.get(batch)
        if found is None:
            found = self.rests[batch] = BatchRest(self, self.now)
        return found


@dataclass(slots=True)
class BatchRest:
    """When the batches of one size next decide whether to ask a learned part: deciding takes time in every round, and
    so does keeping what the part would read.

    ``rounds``: counts them. ``asked``: the one in which anybody was asked last, or batches of the size began;
    ``until``: the one that decides next.
    """

    rounds: BatchRests = field(repr=False)
    asked: int
    until: int = 0

    @property
    def left(self) -> int:
        """How many rounds, this one included, do not decide."""
        return max(0, self.until - self.rounds.now)

    def decided(self, *, asked: bool) -> None:
        """This round did."""
        now = self.rounds.now
        if asked:
            self.asked = now
        self.until = now + 1 + min((now - self.asked) // PATIENCE, LONGEST_REST)


HOPELESS = BatchRest(BatchRests(), 0, LONGEST_REST)
"""That of batches so large that no draft would gain."""


@dataclass(slots=True)
class Shared:
    """What the requests of a process that read a clock have seen of a learned part beside a target."""

    standings: Standings = field(default_factory=Standings)
    clock: Clock = field(default_factory=Clock)
    after: Aftereffect = field(default_factory=Aftereffect)
    drafting: float = 1.0
    """In how many of the last rounds drafts were asked for at all, as a share: where rounds of several requests do not
    draft, what a request reads for its drafts serves few of them."""
    rounds: BatchRests = field(default_factory=BatchRests)

    def saw_round(self, *, drafting: bool) -> None:
        """A round has ended, in which drafts were asked for or not."""
        self.rounds.now += 1
        self.drafting += (drafting - self.drafting) / _ROUNDS


_SHARED: WeakKeyDictionary[Target, dict[tuple[str, bool], Shared]] = WeakKeyDictionary()
"""By the identity of the learned part, and whether requests sample: drafts then take another time and are accepted less
often."""


class Timing(NamedTuple):
    """What the time of a learned draft depends on: how many requests share the round, about how many tokens the longest
    one has, whether all may read a clock, and whether any samples."""

    batch: int
    context: int
    live: bool
    sampled: bool = False


class LearnedTimes:
    """Of ``part``, which ``label`` names, beside ``target``. ``controller`` gives its budgets when its draft is timed.
    ``identity``: tells it from others beside the target. ``proven``: whether it was measured to make decoding faster.
    """

    def __init__(
        self,
        target: Target,
        part: Drafter[Any],
        label: str,
        controller: Controller | None,
        identity: Callable[[], str],
        *,
        proven: bool,
    ) -> None:
        self._target, self._part, self._label = target, part, label
        self._controller = controller or CostModel(target.costs)
        self._predictor = Predictor(target.costs)
        self._identity, self._proven = identity, proven
        self._steps: dict[tuple[int, Timing], float] = {}
        """Of drafts for so many requests."""
        self._version = target.costs.version
        self._shared: dict[bool, Shared] = {}

    @cached_property
    def _name(self) -> str:
        """The part beside this target; a digest of its weights takes a while."""
        return self._identity()

    def shared(self, sampled: bool) -> Shared:
        """What greedy requests have seen, or sampled ones."""
        found = self._shared.get(sampled)
        if found is None:  # asked several times in every round
            known = _SHARED.setdefault(self._target, {})
            found = known.setdefault((self._name, sampled), Shared(Standings(proven=self._proven)))
            self._shared[sampled] = found
        return found

    def draft_steps(self, timed: Timing, count: int) -> float:
        """What a draft for ``count`` of the sequences takes."""
        version = self._target.costs.version
        if self._version != version:
            self._version = version
            self._steps.clear()
        found = self._steps.get((count, timed))
        if found is None:  # asked several times in every round
            found = self._steps[count, timed] = self._predictor.draft_steps(
                lambda: self._seconds(count, timed), NOMINAL_DRAFT, *timed[:2], live=timed.live, sampled=timed.sampled
            )
        return found

    def _seconds(self, count: int, timed: Timing) -> float:
        usual = self.shared(timed.sampled).clock.seconds(count) if timed.live else None
        return self._rehearsed(count, timed.sampled) if usual is None else usual

    def _rehearsed(self, count: int, sampled: bool) -> float:
        size = 1 << (count - 1).bit_length()
        return self._target.costs.once(
            self._rehearsal(size, sampled),
            lambda: draft_seconds(self._target, self._part, self._controller, size, sampled=sampled),
        )

    def _rehearsal(self, size: int, sampled: bool) -> str:
        kind = "sampled sequences" if sampled else "sequences"
        return recorded_as(f"draft of {self._label} {self._name} for {size} {kind}")

    def measure(self, batch: int, *, sampled: bool | None = None) -> None:
        """Rehearse now what would be rehearsed when ``batch`` requests first draft together: ``sampled`` ones, or
        greedy ones; None: both."""
        if not self._target.costs.fixed:
            for kind in (False, True) if sampled is None else (sampled,):
                self._rehearsed(batch, kind)

    def reading(self, unread: int, timed: Timing) -> float:
        """What the part takes to read ``unread`` tokens of a text; 0 where no clock may be read."""
        if not unread or not timed.live:
            return 0.0
        seconds = self.shared(timed.sampled).clock.reading(unread)
        return self._predictor.draft_steps(lambda: seconds, 0.0, *timed[:2], live=True, sampled=timed.sampled)

    def took(self, count: int, unread: int, seconds: float, *, sampled: bool) -> None:
        """A draft for ``count`` requests took so long, which read ``unread`` tokens first. A recorded time of greedy
        drafts that proves too long was measured while the machine was busy; on that of sampled ones answers depend
        that must repeat."""
        clock = self.shared(sampled).clock
        if unread:  # where drafts are seldom asked for, most read a text first: what others take is rehearsed then
            usual = clock.seconds(count)
            if usual is None and not self._target.costs.fixed:
                usual = self._rehearsed(count, sampled)
            if usual is not None:
                clock.read_text(unread, seconds - usual)
            return
        if not clock.read(count, seconds):
            return
        self._steps.clear()
        usual = clock.settled(count)
        if usual is not None and not sampled:
            self._target.costs.correct(self._rehearsal(1 << (count - 1).bit_length(), False), usual)

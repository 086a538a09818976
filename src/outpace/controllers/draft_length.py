"""How many tokens a draft model drafts: by the acceptance so far, and by what its forwards and the target's take.

A round that drafts n tokens commits 1 + a + ... + a^n of them where each is accepted with probability a, given those
before it, and takes n forwards of the draft model and one of the target over 1 + n rows: the n of most tokens per time
(Leviathan et al. 2023, arXiv 2211.17192, section 3.5, whose c is the ratio of the two models' times). It is chosen
before anything of the round is drawn, from the verdicts of earlier rounds alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence as Seq
from itertools import accumulate, chain, islice, repeat
from operator import mul

from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import context_of
from outpace.controllers.fixed import Fixed
from outpace.controllers.predictor import LevelSteps, ModelDraft, Predictor, one_rate, speedups
from outpace.core.metrics import RequestMetrics
from outpace.targets.costs import Costs

PRIOR, WEIGHT = 0.7, 4.0
"""The acceptance rate before any draft token was judged, and how many judged ones it counts as."""
LONGEST = 32
"""Most draft tokens on a path."""
PATIENCE = 8
"""Where drafting does not gain, this round drafts all the same, and then rounds twice, four times, ... as late."""
_BOUND, _MOST_HOPED = 1.5, 0.9
"""Standard errors of the acceptance rate that may be hoped for, and the most of it."""


def acceptance_rate(metrics: RequestMetrics) -> float:
    """Of one draft token, given those before it: the request's so far, at first :data:`PRIOR`."""
    return (WEIGHT * PRIOR + metrics.accepted) / (WEIGHT + metrics.judged)


def hoped_rate(rate: float, metrics: RequestMetrics, batch: int) -> float:
    """What the acceptance rate may become. In a batch, where a trial has the draft model read the texts of all, it is
    an upper bound of what was seen; a text that is alone may change its kind."""
    if batch == 1:
        return max(rate, _MOST_HOPED)
    error = math.sqrt(rate * (1.0 - rate) / (WEIGHT + metrics.judged + 1.0))
    return max(rate, min(_MOST_HOPED, rate + _BOUND * error))


def chosen_length(rate: float, steps: Callable[[], Iterable[float]], metrics: RequestMetrics, batch: int) -> int:
    """The length of the largest expected speed-up. ``steps()``: of rounds with drafts of 1, 2, ... tokens.

    0 where none gains; but after growing intervals (:data:`PATIENCE`) the best length above 0, because only a draft
    shows whether acceptance has changed: unless even :func:`hoped_rate` would gain nothing.
    """
    found = speedups(one_rate(rate), steps())
    if len(found) < 2:
        return 0
    drafting = 1 + max(range(len(found) - 1), key=lambda at: found[1 + at])
    if found[drafting] > 1.0:
        return drafting
    rounds = metrics.rounds
    if rounds < PATIENCE or rounds & (rounds - 1):
        return 0
    # Of the same lengths: longer ones were not measured.
    hoped = speedups(one_rate(hoped_rate(rate, metrics, batch)), islice(steps(), len(found) - 1))
    return drafting if max(hoped[1:]) > 1.0 else 0


class DraftLength(Controller):
    """``target`` scores what ``drafts`` draft, one model after the other, each a tree with ``branching[d]`` children
    for each node at depth d and one beyond its end, of at most ``max_nodes`` draws.

    ``confidence``: as :class:`~outpace.controllers.base.Budget` has it.
    """

    adapts = True

    def __init__(
        self,
        target: Costs,
        drafts: Seq[Costs],
        *,
        branching: Seq[int] = (1,),
        max_nodes: int = LONGEST,
        confidence: float = 0.0,
    ) -> None:
        self._branching, self._max_nodes, self._confidence = branching, max_nodes, confidence
        predictor, models = Predictor(target, ModelDraft(target, drafts)), len(drafts)
        self._steps = LevelSteps(
            lambda batch, context: predictor.steps(self._widths(), models, batch, context),
            lambda: sum(one.version for one in (target, *drafts)),
        )

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        context = context_of(metrics)
        depth = chosen_length(acceptance_rate(metrics), lambda: self._steps.of(batch, context), metrics, batch)
        return Budget(depth, self._max_nodes, max(self._branching), self._confidence)

    def _widths(self) -> list[int]:
        """Nodes of each level of the tree, the root first, as far as there is room for whole levels."""
        widths = accumulate(islice(chain(self._branching, repeat(1)), LONGEST), mul, initial=1)
        found, nodes = [], -1
        for width in widths:
            nodes += width
            if nodes > self._max_nodes:
                break
            found.append(width)
        return found


def draft_length(
    target: Costs,
    drafts: Seq[Costs],
    length: int | None,
    *,
    branching: Seq[int] = (1,),
    max_nodes: int = 64,
    confidence: float = 0.0,
) -> Controller:
    """A fixed ``length``, or, for None, the one that measured costs and acceptance suggest: see DraftLength."""
    if length is not None:
        return Fixed(length, max(branching), max_nodes, confidence)
    return DraftLength(target, drafts, branching=branching, max_nodes=max_nodes, confidence=confidence)

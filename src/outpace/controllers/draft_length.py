"""How many tokens a draft model drafts: by the acceptance so far, and by what its forwards and the target's take.

A round that drafts n tokens commits 1 + a + ... + a^n of them where each is accepted with probability a, given those
before it, and takes n forwards of the draft model and one of the target over 1 + n rows: the n of most tokens per time
(Leviathan et al. 2023, arXiv 2211.17192, section 3.5, whose c is the ratio of the two models' times). It is chosen
before anything of the round is drawn, from the verdicts of earlier rounds alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from itertools import accumulate, chain, count, islice, repeat
from operator import mul

from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import context_of
from outpace.controllers.fixed import Fixed
from outpace.controllers.predictor import ModelDraft, Predictor, speedups
from outpace.core.metrics import RequestMetrics
from outpace.targets.costs import Costs
from outpace.targets.threads import threads

PRIOR, WEIGHT = 0.7, 4.0
"""The acceptance rate before any draft token was judged, and how many judged ones it counts as."""
LONGEST = 32
"""Most draft tokens on a path."""
PATIENCE = 8
"""Where drafting does not gain, this round drafts all the same, and then rounds twice, four times, ... as late."""


def acceptance_rate(metrics: RequestMetrics) -> float:
    """Of one draft token, given those before it: the request's so far, at first :data:`PRIOR`."""
    return (WEIGHT * PRIOR + metrics.accepted) / (WEIGHT + metrics.judged)


def chosen_length(found: Seq[float], metrics: RequestMetrics) -> int:
    """The length of the largest of the speed-ups ``found``, those of 0, 1, 2, ... draft tokens.

    0 where none gains; but after growing intervals (:data:`PATIENCE`) the best length above 0, because only a draft
    shows whether acceptance has changed.
    """
    if len(found) < 2:
        return 0
    drafting = 1 + max(range(len(found) - 1), key=lambda at: found[1 + at])
    rounds = metrics.rounds
    again = rounds >= PATIENCE and rounds & (rounds - 1) == 0
    return drafting if again or found[drafting] > 1.0 else 0


class DraftLength(Controller):
    """``target`` scores what ``drafts`` draft, one model after the other, each a tree with ``branching[d]`` children
    for each node at depth d and one beyond its end, of at most ``max_nodes`` draws.

    ``confidence``: as :class:`~outpace.controllers.base.Budget` has it.
    """

    def __init__(
        self,
        target: Costs,
        drafts: Seq[Costs],
        *,
        branching: Seq[int] = (1,),
        max_nodes: int = LONGEST,
        confidence: float = 0.0,
    ) -> None:
        self._predictor, self._models = Predictor(target, ModelDraft(target, drafts)), len(drafts)
        self._branching, self._max_nodes, self._confidence = branching, max_nodes, confidence
        self._known: dict[tuple[int, int, int], tuple[list[float], Iterator[float]]] = {}

    def budget(self, metrics: RequestMetrics, batch: int, sampled: bool = False) -> Budget:
        rate = acceptance_rate(metrics)
        depth = chosen_length(speedups((rate**at for at in count(1)), self._steps(metrics, batch)), metrics)
        return Budget(depth, self._max_nodes, max(self._branching), self._confidence)

    def _steps(self, metrics: RequestMetrics, batch: int) -> Iterator[float]:
        """What rounds take with drafts of 1, 2, ... levels, in autoregressive steps; measured as they are asked for."""
        context = context_of(metrics)
        known = batch, context, threads()
        if known not in self._known:
            steps = self._predictor.steps(self._widths(), self._models, batch, context)
            self._known[known] = [], steps
        found, more = self._known[known]
        for at in count():
            if at == len(found):
                try:
                    following = next(more, None)
                except BaseException:  # interrupted while measuring: another time from the start
                    self._known.pop(known, None)
                    raise
                if following is None:
                    return
                found.append(following)
            yield found[at]

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

"""How many tokens a draft model drafts: by the acceptance so far, and by what its forwards and the target's take.

A round that drafts n tokens commits 1 + a + ... + a^n of them where each is accepted with probability a, given those
before it, and takes n forwards of the draft model and one of the target over 1 + n rows: the n of most tokens per time
(Leviathan et al. 2023, arXiv 2211.17192, section 3.5, whose c is the ratio of the two models' times). It is chosen
before anything of the round is drawn, from the verdicts of earlier rounds alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from itertools import accumulate, chain, islice, pairwise, repeat
from operator import mul

from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import MARGIN, context_of
from outpace.controllers.fixed import Fixed
from outpace.core.metrics import RequestMetrics
from outpace.targets.costs import Costs
from outpace.targets.threads import threads

PRIOR, WEIGHT = 0.7, 4.0
"""The acceptance rate before any draft token was judged, and how many judged ones it counts as."""
LONGEST = 32
"""Most draft tokens on a path."""
NOMINAL_FORWARD = 0.1
"""A draft model's forward in autoregressive steps, where costs are fixed."""
PATIENCE = 8
"""Where drafting does not gain, this round drafts all the same, and then rounds twice, four times, ... as late."""
_PAST = 0.9
"""Lengths are looked through until one yields less than this share of the best before it."""


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
        self._target, self._drafts = target, drafts
        self._branching, self._max_nodes, self._confidence = branching, max_nodes, confidence
        self._known: dict[tuple[int, int, int], list[float]] = {}

    def budget(self, metrics: RequestMetrics, batch: int, sampled: bool = False) -> Budget:
        depth = self._best(metrics, batch)
        return Budget(depth, self._max_nodes, max(self._branching), self._confidence)

    def _best(self, metrics: RequestMetrics, batch: int) -> int:
        rate = (WEIGHT * PRIOR + metrics.accepted) / (WEIGHT + metrics.judged)
        tokens, paces = 1.0, [1.0]
        for depth, steps in enumerate(self._steps(metrics, batch), start=1):
            tokens += rate**depth
            paces.append(tokens / steps)
            if paces[-1] < _PAST * max(paces[1:]):
                break
        drafting = 1 + max(range(len(paces) - 1), key=lambda at: paces[1 + at], default=-1)
        rounds = metrics.rounds
        again = rounds >= PATIENCE and rounds & (rounds - 1) == 0
        return drafting if again or paces[drafting] > 1.0 else 0

    def _steps(self, metrics: RequestMetrics, batch: int) -> Iterator[float]:
        """What rounds take with drafts of 1, 2, ... levels, in autoregressive steps; measured as they are asked for."""
        context = context_of(metrics)
        known = self._known.setdefault((batch, context, threads()), [])
        widths = [1, *accumulate(islice(chain(self._branching, repeat(1)), LONGEST), mul)]
        spent, nodes = 0.0, 0
        for level, (above, width) in enumerate(pairwise(widths)):
            nodes += width * len(self._drafts)
            if nodes > self._max_nodes * len(self._drafts):
                return
            if level == len(known):
                spent += sum(self._forward(draft, batch, above, context) for draft in self._drafts)
                known.append(spent)
            spent = known[level]
            yield MARGIN * self._target.relative(nodes, batch, context) + spent

    def _forward(self, draft: Costs, batch: int, rows: int, context: int) -> float:
        return self._target.steps(
            lambda: draft.seconds(batch * rows, context), NOMINAL_FORWARD, batch=batch, context=context
        )


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

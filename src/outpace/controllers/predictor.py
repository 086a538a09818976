"""The predictor: how many tokens a round is expected to commit, and how long it takes.

Tokens follow from acceptance rates, which the caller states, time from measured costs: of the target's forward
over the rows of the whole batch, and of the draft. Their ratio, beside one token for each autoregressive step, is the
speed-up (Leviathan et al. 2023, arXiv 2211.17192, section 3.5, for chains of one acceptance rate; Chen et al. 2024,
arXiv 2402.12374, for trees). Times are in autoregressive steps of the batch, so that machines can be compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from functools import lru_cache
from itertools import accumulate, count, islice
from operator import mul
from typing import NamedTuple

from outpace.targets.costs import Costs, FixedCosts
from outpace.targets.threads import threads

MARGIN = 1.05
"""Drafting must promise this much more than an autoregressive step of one request: probabilities are not exact, and
drafts take time."""
NOMINAL_FORWARD = 0.1
"""A draft model's forward in autoregressive steps, where costs are fixed."""
CAUTION = 2.0
"""How many times their time additional rows of a batch count where no clock of this process may be read. Not because
they take longer (LOG.md: they do not): requests whose drafts are accepted have longer contexts than the others, and
looking for drafts takes time in rounds that find none. Else the rounds of the process show what drafting pays
(:mod:`outpace.controllers.payoff`)."""
_PAST = 0.9
"""Lengths are tried until one has less than this share of the best speed-up of the shorter ones."""


class Forecast(NamedTuple):
    """What one request's round is expected to commit, in ``tokens``, and what it takes, in autoregressive ``steps``."""

    tokens: float
    steps: float

    @property
    def speedup(self) -> float:
        """Tokens per autoregressive step: 1 for autoregressive decoding of one request."""
        return self.tokens / self.steps


def best_count(
    probs: Iterable[float], costs: Seq[float], base_tokens: float = 1.0, *, taken: int = 0, spent: float = 0.0
) -> tuple[int, Forecast]:
    """How many of ``probs``, in their order, give the most expected tokens per time, of equal rates the fewest; and
    the round with them.

    ``probs``: path acceptance probabilities. ``costs[n]``: of a round with n draft tokens in all; no more than it has
    costs for are taken. ``base_tokens``: expected without any of them. ``taken``: draft tokens that are scored in any
    case, for which there must be costs. ``spent``: what drafting has cost already, in the unit of ``costs``.
    """
    best, tokens, expected = 0, base_tokens, base_tokens
    most_rate = base_tokens / (costs[taken] + spent)
    for number, prob in enumerate(islice(probs, len(costs) - 1 - taken), start=1):
        expected += prob
        rate = expected / (costs[taken + number] + spent)
        if rate > most_rate:
            best, most_rate, tokens = number, rate, expected
    return best, Forecast(tokens, costs[taken + best] + spent)


class DraftCosts(ABC):
    """What drafts take, in autoregressive steps of the batch. ``together``: all levels are one forward, as those of
    parallel drafters are."""

    together = False

    @abstractmethod
    def level(self, rows: int, batch: int = 1, context: int = 0) -> float:
        """The forwards of one level of the draft, which run ``rows`` rows for each of ``batch`` requests."""

    def levels(self, widths: Iterable[int], batch: int = 1, context: int = 0) -> Iterator[float]:
        """Of drafts with 1, 2, ... levels; level d runs ``widths[d]`` rows for each request. Measured as they are asked
        for."""
        return accumulate(self.level(rows, batch, context) for rows in widths)


class FreeDraft(DraftCosts):
    """A draft that takes almost no time: tokens that are copied or looked up."""

    def level(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return 0.0


class GivenDraft(DraftCosts):
    """A draft of which each level takes ``steps``, as the user says."""

    def __init__(self, steps: float) -> None:
        self._steps = steps

    def level(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return self._steps


class ModelDraft(DraftCosts):
    """``models`` draft beside ``target``, one after the other, one forward of each a level."""

    def __init__(self, target: Costs, models: Seq[Costs]) -> None:
        self._target, self._models = target, models

    def level(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return sum(self._forward(model, rows, batch, context) for model in self._models)

    def _forward(self, model: Costs, rows: int, batch: int, context: int) -> float:
        return self._target.steps(
            lambda: model.even(batch * rows, batch, context), NOMINAL_FORWARD, batch=batch, context=context
        )


class RecordedDraft(DraftCosts):
    """A drafter whose time is not that of whole forwards: ``seconds()`` is what one level of one request's draft takes,
    measured when it is first asked for."""

    def __init__(self, target: Costs, seconds: Callable[[], float], *, together: bool = False) -> None:
        self._target, self._seconds, self.together = target, seconds, together

    def level(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return self._target.steps(self._seconds, NOMINAL_FORWARD, batch=batch, context=context)

    def levels(self, widths: Iterable[int], batch: int = 1, context: int = 0) -> Iterator[float]:
        if not self.together:
            return super().levels(widths, batch, context)
        return (self.level(rows, batch, context) for rows in widths)


class Predictor:
    """Forecasts for one target and one drafter, from their costs."""

    def __init__(self, target: Costs, drafting: DraftCosts | None = None) -> None:
        self.target = target
        self.drafting = drafting or FreeDraft()

    def verification(self, nodes: int, batch: int = 1, context: int = 0) -> float:
        """Steps of a round without its draft, with ``nodes`` draft tokens for each of ``batch`` requests."""
        return self.target.relative(nodes, batch, context)

    def relative_costs(
        self, counts: Iterable[int], batch: int, context: int, *, live: bool, sampled: bool = False
    ) -> list[float]:
        """Steps of rounds with ``counts`` draft tokens in the whole batch, :data:`MARGIN` of one request included.

        ``live``: as rounds have turned out to take in this process, of greedy requests or of ``sampled`` ones.
        """
        step = self.round_seconds(0, batch, context, live=live, sampled=sampled)
        margin = (MARGIN - 1.0) / batch
        growth = CAUTION if batch > 1 and not live else 1.0
        return [
            1.0
            if not more
            else 1.0
            + margin
            + growth * (self.round_seconds(more, batch, context, live=live, sampled=sampled) / step - 1.0)
            for more in counts
        ]

    def round_seconds(self, more: int, batch: int, context: int, *, live: bool = False, sampled: bool = False) -> float:
        """Seconds of a round of ``batch`` requests with ``more`` draft tokens in all, without its draft."""
        return self.target.round_seconds(batch + more, context, batch=batch, live=live, sampled=sampled)

    def steps(self, widths: Iterable[int], models: int = 1, batch: int = 1, context: int = 0) -> Iterator[float]:
        """Steps of rounds with drafts of 1, 2, ... levels, their drafting included: level d drafts after ``widths[d]``
        nodes and has ``widths[d + 1]``, each of ``models`` times."""
        widths = list(widths)
        spent = self.drafting.levels(widths[:-1], batch, context)
        nodes = accumulate(models * width for width in widths[1:])
        for total in nodes:
            yield MARGIN * self.verification(total, batch, context) + next(spent)

    def draft_steps(
        self,
        seconds: Callable[[], float],
        nominal: float,
        batch: int,
        context: int,
        *,
        live: bool,
        sampled: bool = False,
    ) -> float:
        """A draft of ``seconds()`` in autoregressive rounds of ``batch`` requests; ``nominal`` where costs are fixed.
        ``live``, ``sampled``: as for :meth:`relative_costs`."""
        if self.target.fixed:
            return nominal
        return seconds() / self.round_seconds(0, batch, context, live=live, sampled=sampled)

    def forecast(
        self, probs: Seq[float], *, nodes: int | None = None, drafted: float = 0.0, batch: int = 1, context: int = 0
    ) -> Forecast:
        """A round of a draft whose nodes are accepted with ``probs`` (path acceptance probabilities).

        ``nodes``: how many are scored, where not as many as there are probabilities; ``drafted``: steps that the draft
        takes.
        """
        scored = len(probs) if nodes is None else nodes
        return Forecast(1.0 + sum(probs), self.verification(scored, batch, context) + drafted)


class LevelSteps:
    """What rounds take with drafts of 1, 2, ... levels, for each batch, context and number of threads; kept, and
    measured only as far as somebody asks. ``begin(batch, context)`` yields them, anew where ``version()`` of the costs
    has changed: they may have been measured again."""

    def __init__(self, begin: Callable[[int, int], Iterator[float]], version: Callable[[], int] = lambda: 0) -> None:
        self._begin, self._version = begin, version
        self._of_version = version()
        self._known: dict[tuple[int, int, int], tuple[list[float], Iterator[float]]] = {}

    def of(self, batch: int, context: int) -> Iterator[float]:
        """In autoregressive steps of the batch."""
        version = self._version()
        if version != self._of_version:
            self._of_version = version
            self._known.clear()
        known = batch, context, threads()
        if known not in self._known:
            self._known[known] = [], self._begin(batch, context)
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


@lru_cache(maxsize=64)
def nominal_costs(most: int) -> tuple[float, ...]:
    """Relative costs of rounds with 0 to ``most`` draft tokens where nobody states measured ones."""
    return tuple(map(FixedCosts().relative, range(most + 1)))


def one_rate(rate: float) -> Iterator[float]:
    """The path acceptance probabilities of a chain whose tokens are all accepted with ``rate``, given those before."""
    return (rate**length for length in count(1))


def chain_probs(rates: Iterable[float]) -> Iterator[float]:
    """The path acceptance probabilities of a chain whose tokens are accepted with ``rates``, given those before."""
    return accumulate(rates, mul)


def tokens_per_round(rate: float, length: int) -> float:
    """Expected tokens of a round with ``length`` draft tokens of one acceptance rate, the target's own included."""
    return sum(rate**number for number in range(length + 1))


def speedups(probs: Iterable[float], steps: Iterable[float]) -> list[float]:
    """Expected speed-ups of drafts of 0, 1, 2, ... tokens, until they fall well below the best of those with a draft.

    ``probs[i]``: the path acceptance probability of token i; ``steps[i]``: what a round takes with i + 1 of them.
    """
    tokens, found = 1.0, [1.0]
    for prob, cost in zip(probs, steps, strict=False):
        tokens += prob
        found.append(tokens / cost)
        if found[-1] < _PAST * max(found[1:]):
            break
    return found

"""Which strategy a request is given: the one with the largest expected speed-up, or now and then another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from outpace.controllers.draft_clock import Clock
from outpace.controllers.predictor import DraftCosts, Forecast, Predictor
from outpace.methods.combination.aio.strategy_estimates import Estimate, Expected, priors
from outpace.targets.costs import Costs

AUTOREGRESSIVE = "autoregressive"
"""The kind of a strategy that drafts nothing; others have the kinds of ``priors.json``."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A method among which the router chooses. ``drafting``: what its drafts take, where it drafts."""

    name: str
    kind: str
    target: Costs
    drafting: DraftCosts

    @property
    def drafts(self) -> bool:
        return self.kind != AUTOREGRESSIVE

    def forecast(
        self,
        expected: Expected,
        width: float,
        batch: int,
        context: int,
        *,
        live: bool,
        draft_seconds: float | None = None,
    ) -> Forecast:
        """A request's rounds on average. ``width``: nodes on each level of a draft. ``live``: as rounds have come to
        take in this process; ``draft_seconds``: what drafts were seen to take, None: as their costs say."""
        predictor, nodes = Predictor(self.target, self.drafting), round(expected.nodes)
        batch = 1 if self.target.fixed else batch
        [verified] = predictor.relative_costs([batch * nodes], batch, context, live=live)
        levels = max(1, round(nodes / width))
        *_, spent = predictor.drafting.levels([1] * levels, batch, context)
        if draft_seconds is not None:
            spent = predictor.draft_steps(lambda: draft_seconds, spent, batch, context, live=live)
        rest, tokens = 1.0 - expected.drafting, 1.0 + expected.accepted
        return Forecast(rest + expected.drafting * tokens, rest + expected.drafting * (verified + spent))


class Routes:
    """What requests have shown of the strategies. ``live``: greedy ones of a process, for which clocks may be read;
    else sampled ones of a namespace."""

    def __init__(self, strategies: Seq[Strategy], *, live: bool) -> None:
        self.strategies, self.live = strategies, live
        known = priors()
        self.estimates = [Estimate(known[one.kind]) if one.drafts else None for one in strategies]
        self.clocks = [Clock() for _ in strategies]
        """Of drafts, by how many requests drafted together; read where ``live``."""

    def speedups(self, numbers: Seq[float], batch: int, context: int) -> tuple[list[float], list[float]]:
        """Tokens per autoregressive step with each strategy: as expected, and where its figures are a standard
        deviation better."""
        expected, hoped = [], []
        for one, known, clock in zip(self.strategies, self.estimates, self.clocks, strict=True):
            if known is None:
                expected.append(1.0)
                hoped.append(1.0)
                continue
            seconds = clock.seconds(batch) if self.live else None
            for guess, speeds in zip(known.expected(numbers), (expected, hoped), strict=True):
                found = one.forecast(guess, known.width, batch, context, live=self.live, draft_seconds=seconds)
                speeds.append(found.speedup)
        return expected, hoped

    def odds(self, numbers: Seq[float], batch: int, context: int, explore: float) -> list[float]:
        """With what probability each strategy is chosen for a request whose prompt has these numbers.

        The best one, but for a share ``explore`` of the requests that is divided among those that may be better: whose
        estimate is larger than the best one's when it is raised by its standard deviation.
        """
        expected, hoped = self.speedups(numbers, batch, context)
        best = max(range(len(expected)), key=lambda at: expected[at])
        rivals = [at for at, speed in enumerate(hoped) if at != best and speed > expected[best]]
        odds = [0.0] * len(expected)
        for at in rivals:
            odds[at] = explore / len(rivals)
        odds[best] = 1.0 - sum(odds)
        return odds


MakeRoutes = Callable[[bool], Routes]
"""By ``live``."""

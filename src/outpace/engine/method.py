"""Method: a drafter, an acceptance rule and a controller that fit one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.greedy import Greedy
from outpace.controllers.base import Controller
from outpace.core.metrics import RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.drafting.base import Drafter

if TYPE_CHECKING:
    from outpace.engine.populations.base import Population
    from outpace.engine.request import Request

GREEDY = Greedy()


@dataclass(frozen=True, slots=True)
class Method:
    """A built method, ready to decode with one target. Refused on construction when its parts do not fit.

    ``drafts_with``: the draft models and heads that it asked for when it was built, in words. ``prepare`` makes of a
    request the one that is decoded, with a constraint perhaps; it raises BadInput for what the method does not take.
    ``departs``: how its answers depart from the target's own, whatever its rule; "": they do not.
    ``population``: makes of a request how its group of sequences is decoded; None: it has one sequence.
    """

    name: str
    drafter: Drafter[Any]
    rule: AcceptanceRule
    controller: Controller
    family: str = field(default="", compare=False)
    drafts_with: tuple[str, ...] = field(default=(), compare=False)
    prepare: Callable[[Request], Request] | None = None
    departs: str = ""
    population: Callable[[Request], Population] | None = None

    def __post_init__(self) -> None:
        self.rule.check(self.name, self.drafter.proposal)

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is the target's."""
        return self.rule.exact and not self.departs

    @property
    def lossy(self) -> str | None:
        """The lossy rule and its settings, as results name them, and how the method itself departs; None: lossless."""
        named = [self.departs] if self.departs else []
        return ", ".join(named if self.rule.exact else [*named, self.rule.described]) or None

    def exact_for(self, params: SamplingParams) -> bool:
        """Whether answers under ``params`` are the target's: some lossy rules keep greedy decoding as it is."""
        return self.lossless or (not self.departs and self.rule_for(params) is GREEDY)

    @property
    def controlled_by(self) -> str | None:
        """The name of the controller that the caller chose, if any."""
        return getattr(self.controller, "name", None)

    @property
    def may_draft(self) -> bool:
        """Whether its controller asks for a draft at the start (that of autoregressive decoding never does)."""
        return self.controller.budget(RequestMetrics(), 1, repeatable=True).depth > 0

    def rule_for(self, params: SamplingParams) -> AcceptanceRule:
        """The rule of one request: a lossless rule at temperature 0 is the greedy walk, which needs no p."""
        self.rule.check_params(params)
        self.controller.check_params(params)
        greedy = params.greedy and (self.rule.lossless or self.rule.keeps_greedy)
        return GREEDY if greedy else self.rule

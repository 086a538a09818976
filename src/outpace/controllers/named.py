"""NamedController: a controller that a user may choose for any method that it fits, in place of the method's own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import BaseModel

from outpace.controllers.base import Budget, Controller
from outpace.controllers.draft_length import LONGEST, DraftLength
from outpace.controllers.policy import DraftPolicy
from outpace.controllers.predictor import DraftCosts, Predictor
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.proposal import Proposal
from outpace.core.validation import StrictModel
from outpace.targets.costs import Costs


class NoSettings(StrictModel):
    """A controller without settings."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a controller is built for: a method that is called ``label``, with its ``own`` controller and drafter.

    ``drafting``: what its drafts take. ``asks_policy``, ``weighs_costs``: as its drafter declares them. ``combined``:
    whether it drafts with several drafters. ``companion``: the costs of the model that scores its drafts.
    """

    label: str
    target: Costs
    own: Controller
    drafting: DraftCosts
    proposal: Proposal
    asks_policy: bool = False
    weighs_costs: bool = False
    combined: bool = False
    companion: Costs | None = None

    @property
    def predictor(self) -> Predictor:
        """Forecasts for this target and drafter."""
        return Predictor(self.target, self.drafting)

    def shape(self, metrics: RequestMetrics, batch: int, repeatable: bool) -> Budget:
        """The budget of the method's own controller with the longest draft that it would ever allow."""
        budget = self.own.budget(metrics, batch, repeatable)
        return replace(budget, depth=LONGEST) if isinstance(self.own, DraftLength) else budget

    def of_length(self, shape: Budget, length: int) -> Budget:
        """``shape`` with drafts of exactly ``length`` levels. Chains have no more tokens, whatever they cost; trees
        keep what limits their number of nodes."""
        limited = shape.limited(length)
        if self.combined or self.proposal.tree:
            return limited
        return replace(limited, max_nodes=min(shape.max_nodes, length), relative_costs=(), base_tokens=1.0)


class NamedController(Controller):
    """A controller with a name. Subclasses are found by :mod:`outpace.controllers.registry`.

    ``paper``: where it comes from. ``summary``: one sentence, for lists. ``fits``: which methods it fits, in words.
    ``bench_only``: whether it knows the answer beforehand. ``companion``: whether it needs a second draft model.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str]
    summary: ClassVar[str]
    fits: ClassVar[str] = "every method"
    Settings: ClassVar[type[BaseModel]] = NoSettings
    bench_only: ClassVar[bool] = False
    companion: ClassVar[bool] = False

    def __init__(self, setup: Setup, settings: BaseModel) -> None:
        self.setup = setup
        self.check(setup)

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Raise BadInput where it does not fit the method."""

    @classmethod
    def refuse(cls, setup: Setup, why: str) -> BadInput:
        """The error for a method that it does not fit."""
        return BadInput(
            f"controller '{cls.name}' does not fit method '{setup.label}': {why}. It fits {cls.fits}. "
            "See: outpace controllers"
        )

    @classmethod
    def public(cls) -> dict[str, Any]:
        """The entry of ``outpace controllers --json``."""
        return {
            "name": cls.name,
            "aliases": list(cls.aliases),
            "paper": cls.paper,
            "summary": cls.summary,
            "fits": cls.fits,
            "bench_only": cls.bench_only,
            "settings": {
                name: {"default": one.get_default(call_default_factory=True), "meaning": one.description}
                for name, one in cls.Settings.model_fields.items()
            },
        }

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        return self.setup.shape(metrics, batch, repeatable)

    def memory(self) -> Any:
        """What is kept for the requests of one namespace."""
        return None

    def policy(self, memory: Any, *, sampled: bool) -> DraftPolicy | None:
        """The decisions of one request, where there are any within a draft. ``sampled``: its temperature is above
        0."""
        return None


class StoppingController(NamedController):
    """One that ends a draft by the rows that the drafter would draw from."""

    fits = "methods that draft with a model or a head one level after the other, and parallel heads that draft a chain"

    @classmethod
    def check(cls, setup: Setup) -> None:
        if setup.combined:
            raise cls.refuse(setup, "it drafts with several drafters, which decide for themselves")
        if not setup.asks_policy:
            raise cls.refuse(setup, "its drafter has no distribution to stop by")

    def longest(self, metrics: RequestMetrics, batch: int, repeatable: bool, most: int) -> Budget:
        """The longest draft that there may be, of at most ``most`` levels: what ends it before is the policy."""
        shape = self.setup.shape(metrics, batch, repeatable)
        return self.setup.of_length(shape, min(shape.depth, most))

    @abstractmethod
    def policy(self, memory: Any, *, sampled: bool) -> DraftPolicy: ...

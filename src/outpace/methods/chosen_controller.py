"""A method's parts under a controller that the caller chose in place of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outpace.controllers.named import NamedController, Setup
from outpace.controllers.predictor import DraftCosts, FreeDraft, ModelDraft, RecordedDraft
from outpace.controllers.registry import ControllerChoice, configured
from outpace.core.errors import BadInput
from outpace.drafting.base import Drafter
from outpace.drafting.best_first import BestFirst
from outpace.drafting.combination import Combined
from outpace.drafting.companion import Companion
from outpace.drafting.controlled import ControlledDrafter
from outpace.drafting.copying import CopyDrafter
from outpace.drafting.marginals import FromMarginals
from outpace.drafting.model_drafter import DraftModel
from outpace.engine.rehearsal import draft_seconds, recorded_as
from outpace.methods.bindings import DRAFT_MODEL
from outpace.methods.context import Context, Parts
from outpace.methods.none import NoDraft

_REHEARSED = 2
"""Levels of the draft that is timed where a drafter's levels are not forwards of a model."""


def controlled(label: str, parts: Parts, context: Context, choice: ControllerChoice) -> Parts:
    """``parts`` of the method ``label`` under the controller of ``choice``.

    Raises BadInput for a controller that does not exist, for its settings, and where it does not fit the method.
    """
    kind, settings = configured(choice)
    drafter = parts.drafter
    if isinstance(drafter, NoDraft):  # the baseline drafts nothing under any controller
        return parts
    setup = Setup(
        label,
        context.target.costs,
        parts.controller,
        draft_costs(label, parts, context),
        drafter.proposal,
        asks_policy=drafter.asks_policy,
        weighs_costs=drafter.weighs_costs,
        combined=isinstance(drafter, Combined),
    )
    companion = None
    if kind.companion:
        kind.check(setup)  # before a model is loaded
        companion = Companion(_companion(kind, context, getattr(settings, "companion", "")))
        setup = replace(setup, companion=companion.draft.costs)
    controller = kind(setup, settings)
    if companion is not None or controller.policy(controller.memory(), sampled=False) is not None:
        drafter = ControlledDrafter(drafter, controller, companion)
    return replace(parts, drafter=drafter, controller=controller)


def draft_costs(label: str, parts: Parts, context: Context) -> DraftCosts:
    """What the drafts of a method take."""
    drafter: Drafter[Any] = parts.drafter
    costs = context.target.costs
    if isinstance(drafter, DraftModel):
        return ModelDraft(costs, [drafter.draft.costs])
    if isinstance(drafter, CopyDrafter | BestFirst):
        return FreeDraft()
    together = isinstance(drafter, FromMarginals)

    def seconds() -> float:
        whole = costs.once(
            recorded_as(f"draft of two levels by {label}"),
            lambda: draft_seconds(context.target, drafter, parts.controller),
        )
        return whole if together else whole / _REHEARSED

    return RecordedDraft(costs, seconds, together=together)


def _companion(kind: type[NamedController], context: Context, name: str) -> Any:
    """The draft model that scores drafts: that of ``name``, or the first that the method does not draft with.

    Raises BadInput where there is none.
    """
    found = context.bindings.find(DRAFT_MODEL, name)
    unused = [one for one in found if str(one) not in context.taken]
    chosen = found if name else unused
    if not chosen or (name and str(chosen[0]) in context.taken):
        wanted = f"a draft model named '{name}' that the method does not draft with" if name else "a second draft model"
        raise BadInput(
            f"controller '{kind.name}' needs {wanted}: give --draft-model NAME=MODEL once more, and "
            "--controller-param companion=NAME to choose"
        )
    model = chosen[0].load()
    if model.vocab_size != context.target.vocab_size:
        raise BadInput(
            f"the companion has {model.vocab_size} tokens and the target {context.target.vocab_size}; "
            "choose a draft model with the target's vocabulary"
        )
    context.taken.append(str(chosen[0]))
    return model

"""``aio``: a router gives each request the strategy that is expected to answer it soonest.

A-IO (Adaptive Inference Orchestration) chooses model scale and decoding strategy (autoregressive, prompt lookup,
speculative decoding) for each request by its kind, because no single choice is best for all of them. Here the target
stays: strategies differ in how its answer is drafted, and so in time alone. Offered are autoregressive decoding, the
suffix automaton, the head that ``auto`` would draft with, and each draft model that the caller named. Another model's
answers are never given in place of the target's.

The choice is made once, before anything is drafted, by the prompt (:mod:`.prompt_features`), by what earlier requests
have shown (:mod:`.strategy_estimates`) and by measured costs for as many requests as share the decoder
(:mod:`.routing`). It never depends on what is drawn, and the part that was chosen is judged by an exact rule: so every
request has the target's distribution, whichever part drafts. A part that was not chosen costs nothing: it reads
neither the prompt nor the answer.

Greedy requests learn from all greedy requests of the process, sums of figures alone. Sampled requests learn within
their namespace, because which draft tokens a sampled answer had must not depend on others' requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel
from outpace.drafting.base import Drafter
from outpace.methods.bindings import Bindings
from outpace.methods.registry import Context, Parts, find, register

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule


class AioSettings(StrictModel):
    """Settings of ``aio``."""

    strategies: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        max_length=16,
        description="methods to choose from; by default none, sam, the head that auto would use, and a draft-model for "
        "each draft model that is named",
    )
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description='settings of the strategies: {"sam": {"min_match": 4}}'
    )
    explore: float = Field(
        0.02,
        ge=0.0,
        le=1.0,
        description="share of requests that try a strategy which may be better than the best known",
    )
    namespaces: int = Field(
        64, ge=1, description="maximum number of namespaces whose sampled requests are learned from"
    )


def offered(context: Context, settings: AioSettings) -> tuple[str, ...]:
    """The strategies: those that were named, or all that there are weights for."""
    if settings.strategies is not None:
        return settings.strategies
    from outpace.methods.combination.auto import AutoSettings, learned_part

    heads = Bindings(context.bindings.heads, context.bindings.default)
    head = learned_part(
        replace(context, bindings=heads, taken=[]), AutoSettings.model_validate({"settings": settings.settings})
    )
    named = context.bindings.draft_models
    drafts = [f"draft-model#{one.name}" for one in named] if len(named) > 1 else ["draft-model"] * len(named)
    return ("none", "sam", *([] if head is None else [head[0]]), *drafts)


@register(
    "aio",
    family="combination",
    paper="A-IO: Adaptive Inference Orchestration for Memory-Bound NPUs (its router; outpace's own estimator)",
    summary="A router gives each request the strategy that is expected to answer it soonest: autoregressive, lookup, "
    "head or draft model.",
    when_to_use="A server or a batch with prompts of different kinds, above all with one or more draft models. Not "
    "for one long text whose character changes; auto chooses in every round.",
    aliases=("router", "a-io"),
    optional=("head", "draft model"),
    routes=True,
    tiny={
        "strategies": ("none", "pld", "draft-model"),
        "settings": {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 1}},
        "explore": 0.6,
    },
)
def build(context: Context, settings: AioSettings) -> Parts:
    """The router over the strategies. Raises BadInput for one that is unknown, named twice or not exact."""
    from outpace.controllers.combined import CombinedController
    from outpace.methods.chosen_controller import draft_costs
    from outpace.methods.combination.aio.prompt_features import PromptFeatures
    from outpace.methods.combination.aio.routed_drafter import Routed
    from outpace.methods.combination.aio.routing import Routes, Strategy
    from outpace.methods.combination.parts import CombinationSettings, build_parts

    names = offered(context, settings)
    if settings.strategies is None:
        stray = next((name for name in settings.settings if name not in names), None)
        if stray is not None:
            raise BadInput(f"settings are given for '{stray}', which is none of aio's strategies ({', '.join(names)})")
    built = build_parts(context, CombinationSettings(parts=names, settings=settings.settings))
    strategies = [
        Strategy(name, _kind(name, parts.drafter), context.target.costs, draft_costs(name, parts, context))
        for name, parts in zip(names, built.parts, strict=True)
    ]
    drafter = Routed(
        built.drafters,
        names,
        context.target,
        PromptFeatures(context.tokenizer),
        lambda live: Routes(strategies, live=live),
        settings.explore,
        settings.namespaces,
    )
    return Parts(drafter, CombinedController(built.controllers), _rule(built.parts))


def _rule(built: Seq[Parts]) -> AcceptanceRule | None:
    """The rule that all strategies which sample bring, where it is one: others' draft tokens are deterministic, which
    every rule takes. Else the default for what all of them draft."""
    rules = [one.rule for one in built if one.drafter.proposal.sampled]
    return rules[0] if len({one and one.described for one in rules}) == 1 else None


def _kind(name: str, drafter: Drafter[Any]) -> str:
    """The kind of a strategy, by which it has a prior."""
    from outpace.drafting.copying import CopyDrafter
    from outpace.methods.combination.aio.routing import AUTOREGRESSIVE
    from outpace.methods.none import NoDraft

    if isinstance(drafter, NoDraft):
        return AUTOREGRESSIVE
    if isinstance(drafter, CopyDrafter):
        return "lookup"
    info = find(name)
    return "head" if info.trained else "draft" if "draft model" in info.needs else "other"

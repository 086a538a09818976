"""``auto``: a learned drafter, a copying one, both or neither, chosen each round by acceptance and measured costs.

Two parts at most. The *free* part (the suffix automaton) is asked in every round: it takes microseconds, and states how
likely its tokens are accepted. The *learned* part (a head, or a draft model) takes a share of a forward, so it is asked
only where rounds with it have brought more tokens per time than the free part promises now, or than an autoregressive
step gives. The trees of both are united, and as many nodes are scored as raise the expected tokens per time. A learned
part that does not is left out and tried again after growing intervals; where neither part gains, decoding is
autoregressive.

Rates are tokens over time in units of an autoregressive step. Times are those of ``targets/costs.py``. Beside them
greedy requests go by the clock; sampled ones by one rehearsal of the learned part's draft, kept with the target's
costs, so that a seed reproduces its answer. What is learned belongs to the request's namespace. Only whether a learned
part gains at all is remembered across greedy requests (:class:`~outpace.controllers.yields.Standing`): so one that does
not, such as a head without training, is tried ever less.

Choosing a round's drafter by what it yields for its time is what MetaSD's bandits do (Kim, Jung, Yun 2026, arXiv
2604.05417); here no arm is pulled at random, because the free part's promise is known before any time is spent.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from outpace.controllers.combined import CombinedController
from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel
from outpace.methods.combination.auto_drafter import Auto
from outpace.methods.registry import Context, Parts, find, methods, register
from outpace.targets.base import Target
from outpace.targets.cost_table import digest

if TYPE_CHECKING:
    from outpace.heads.base import Head

FREE = "sam"
DRAFT_MODEL = {"num_draft_tokens": 4, "topk": 3, "max_nodes": 12}
"""How a draft model that the user named drafts: a tree, which a match of the free part can join and be cut with."""


class AutoSettings(StrictModel):
    """Settings of ``auto``."""

    free: str = Field(FREE, description="the method that is asked in every round: one that takes next to no time")
    learned: tuple[str, ...] | None = Field(
        None, description="learned methods: the first that there is a head for drafts; by default all, [] for none"
    )
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description='settings of the parts by name: {"eagle3": {"max_nodes": 8}}'
    )
    namespaces: int = Field(64, ge=1, description="most namespaces whose statistics are kept")


def learned_methods() -> tuple[str, ...]:
    """Names of all registered methods that draft with a trained head, those named like their head first."""
    trained = [info for info in methods() if info.trained and info.lossless]
    return tuple(info.name for info in sorted(trained, key=lambda info: info.name != info.head))


def learned_part(context: Context, settings: AutoSettings) -> tuple[str, Parts] | None:
    """The learned part: with a head that was named, with a draft model that was, or with a shipped head; else None.

    Of several the one that has measured best, as ``outpace eval-head --record`` has written it beside the head. Raises
    BadInput for a head or draft model that the user named and that does not fit.
    """
    infos = [find(name) for name in (learned_methods() if settings.learned is None else settings.learned)]
    if not infos:
        return None
    if settings.learned is None:
        measured = {info.name: context.measured(info.name, info.head or "") for info in infos}
        infos.sort(key=lambda info: -(measured[info.name] or 0.0))
    if context.heads:
        for info in infos:
            if info.head in context.heads:
                return info.name, context.parts(info.name, settings.settings.get(info.name))
        raise BadInput(
            f"none of the methods that auto chooses from ({', '.join(info.name for info in infos)}) drafts with a head "
            f"of kind {' or '.join(context.heads)}"
        )
    if context.has_draft and settings.learned is None:
        return "draft-model", context.parts("draft-model", {**DRAFT_MODEL, **settings.settings.get("draft-model", {})})
    for info in infos:
        try:
            return info.name, context.parts(info.name, settings.settings.get(info.name))
        except BadInput:  # no head is shipped for this model, or none that loads
            if settings.learned is not None and info is infos[-1]:
                raise
    return None


@register(
    "auto",
    family="combination",
    paper="outpace's own; after Kim, Jung, Yun 2026, arXiv 2604.05417",
    summary="A learned drafter, the suffix automaton, both or neither, chosen by acceptance and measured costs.",
    when_to_use="The default: on any text with a head for the model, without one where text repeats. A part "
    "that does not gain is left out; without any gain it decodes autoregressively.",
    tiny={"settings": {"eagle3": {"max_nodes": 3, "depth": 2, "topk": 2}}},
)
def build(context: Context, settings: AutoSettings) -> Parts:
    """The free part, and the learned one that there is."""
    known = {settings.free, "draft-model", *(learned_methods() if settings.learned is None else settings.learned)}
    stray = next((name for name in settings.settings if name not in known), None)
    if stray is not None:
        raise BadInput(f"settings are given for '{stray}', which is none of auto's parts ({', '.join(sorted(known))})")
    free = context.parts(settings.free, settings.settings.get(settings.free))
    if free.drafter.proposal.sampled or free.drafter.needs_target_internals or find(settings.free).trained:
        raise BadInput(f"auto asks its free part in every round; '{settings.free}' samples, or runs a model for it")
    built = {settings.free: free}
    used: list[Any] = []

    def head(*kinds: str) -> Head:
        found = context.head(*kinds)
        used.append(found)
        return found

    def draft() -> Target:
        found = context.draft()
        used.append(found)
        return found

    learned = learned_part(replace(context, head=head, draft=draft), settings)
    if learned is not None:
        built[learned[0]] = learned[1]
    for name, parts in built.items():
        if parts.rule is not None and not parts.rule.lossless:
            raise BadInput(f"'{name}' brings its own acceptance rule '{parts.rule.name}', which changes the output")
    drafter = Auto(
        [one.drafter for one in built.values()],
        list(built),
        context.target,
        settings.namespaces,
        controller=None if learned is None else learned[1].controller,
        identity=lambda: f"{identity(used)} {settings.settings.get(list(built)[-1], {})}",
    )
    return Parts(drafter, CombinedController([one.controller for one in built.values()], united=True))


def identity(used: Seq[Any]) -> str:
    """Tells heads and draft models, by their weights and sizes, from others that a method could draft with."""
    return " ".join(
        f"{one.num_layers}x{one.hidden_size} {one.dtype}" if isinstance(one, Target) else digest(one.named_parameters())
        for one in used[-1:]  # of several that were tried the last one fits
    )

"""``auto``: a learned drafter, a copying one, both or neither, chosen each round by acceptance and measured costs.

Two parts at most. The *free* part (the suffix automaton) is asked in every round: it takes microseconds, and states how
likely its tokens are accepted. The *learned* part (a head, or a draft model) takes a share of a forward, so it is asked
only where rounds with it are expected to commit more tokens per time than the free part promises now, or than an
autoregressive step gives. The trees of both are united, and as many nodes are scored as raise the expected tokens per
time. A learned part that does not is left out and tried again after growing intervals; where neither part gains,
decoding is autoregressive.

All options are compared by one measure (:mod:`outpace.controllers.learned_plan`): expected tokens of the whole round,
beyond what its time, the learned draft included, gives at the request's pace. In a batch the decision is one for all
requests: the learned part drafts for those with which the batch commits most per time, or for none. Times are those of
``targets/costs.py``: as rounds and drafts have come to take in this process; for sampled answers that must be the same
again for their seed as recorded, with one rehearsal of the learned part's draft. What is learned belongs to the
request's namespace. Only figures of what a learned part adds are remembered across requests, of greedy and of sampled
ones and of short and long texts apart (:class:`~outpace.controllers.yields.Standings`): so one that adds nothing, such
as a head without training, is tried less and less.

``faser`` (Chen et al. 2026, arXiv 2604.20503) is this method for batches: each request's draft length follows its
acceptance and the measured costs of the batch, in every round, and is 0 where none gains (``engine/row_sharing.py``
shares out the rows of a forward). Its early pruning, a forward that stops rejected branches between layers, is not
built: ``benchmarks/early_pruning.py`` computes what it could gain. Its overlap of drafting and verification needs
several devices.

Choosing a round's drafter by what it yields for its time is what MetaSD's bandits do (Kim, Jung, Yun 2026, arXiv
2604.05417); here no arm is pulled at random, because the free part's promise is known before any time is spent.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from outpace.controllers.combined import CombinedController
from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel
from outpace.drafting.with_grammar import WithGrammar
from outpace.methods.bindings import Binding, split
from outpace.methods.combination.auto_drafter import Auto
from outpace.methods.registry import Context, Parts, find, methods, register
from outpace.targets.cost_table import digest

FREE = "sam"
DRAFT_MODEL = {"num_draft_tokens": 4, "topk": 3, "max_nodes": 12}
"""How a draft model that the user named drafts: a tree, which a match of the free part can join and be cut with."""


class AutoSettings(StrictModel):
    """Settings of ``auto``."""

    free: str = Field(FREE, description="the method that drafts in every round; it should take almost no time")
    learned: tuple[str, ...] | None = Field(
        None,
        description="learned methods in order of preference: the first one with a head drafts; by default "
        "all, [] for none",
    )
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description='settings of the parts by name: {"eagle3": {"max_nodes": 8}}'
    )
    namespaces: int = Field(64, ge=1, description="maximum number of namespaces whose statistics are kept")


def learned_methods() -> tuple[str, ...]:
    """Names of all registered methods that draft with a trained head, those named like their head first."""
    trained = [info for info in methods() if info.trained and info.lossless]
    return tuple(info.name for info in sorted(trained, key=lambda info: info.name != info.head))


def learned_part(context: Context, settings: AutoSettings) -> tuple[str, Parts] | None:
    """The learned part: with a head that was named, with a draft model that was, or with a shipped head; else None.

    Of several the one that has measured best, as ``outpace eval-head --record`` has written it beside the head; none
    that was no faster than autoregressive decoding. Raises BadInput for a head or draft model that the user named and
    that does not fit.
    """
    labels = learned_methods() if settings.learned is None else settings.learned
    if not labels:
        return None
    heads = context.bindings.heads
    has_draft = settings.learned is None and bool(context.bindings.draft_models)
    offered = {label: found[0] for label in labels if (found := _heads_for(context, label))}
    if heads and not offered:
        raise BadInput(
            f"none of the methods that auto chooses from ({', '.join(labels)}) drafts with a head of kind "
            f"{' or '.join(one.kind for one in heads)}"
        )
    if has_draft and not heads:
        labels = ()
    elif settings.learned is None:
        speed = {label: head.speedup(find(label).name) for label, head in offered.items()}
        gains = (label for label, known in speed.items() if known is None or known > 1.0)
        labels = tuple(sorted(gains, key=lambda label: -(speed[label] or 0.0)))
    elif heads:
        labels = tuple(offered)
    if has_draft and not labels:
        return "draft-model", context.parts("draft-model", {**DRAFT_MODEL, **settings.settings.get("draft-model", {})})
    for label in labels:
        try:
            return label, context.parts(label, settings.settings.get(label))
        except BadInput:  # no head is shipped for this model, or none that loads
            if heads or (settings.learned is not None and label == labels[-1]):
                raise
    return None


def _proven(context: Context, label: str) -> bool:
    """Whether the learned part was measured to make decoding faster with the head that it drafts with."""
    return any((head.speedup(find(label).name) or 0.0) > 1.0 for head in _heads_for(context, label)[:1])


def _heads_for(context: Context, label: str) -> list[Binding]:
    """The heads that a learned method may draft with."""
    kind = find(label).head
    return [] if kind is None else context.bindings.find(kind, split(label)[1])


@register(
    "auto",
    family="combination",
    paper="outpace's own; after Kim, Jung, Yun 2026, arXiv 2604.05417; Chen et al. 2026, arXiv 2604.20503 (FASER)",
    summary="Drafts with a learned drafter, the suffix automaton, both or neither, chosen by acceptance and "
    "measured costs.",
    when_to_use="The default, for any text. Without a head for the model it gains only where text repeats. A part "
    "that does not make decoding faster is not used. In batches (FASER) draft lengths follow the load.",
    aliases=("faser",),
    optional=("head", "draft model"),
    tiny={"settings": {"eagle3": {"max_nodes": 2, "depth": 2, "topk": 2}}},
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
    learned = learned_part(context, settings)
    if learned is not None:
        built[learned[0]] = learned[1]
    for name, parts in built.items():
        if parts.rule is not None and not parts.rule.lossless:
            raise BadInput(f"'{name}' brings its own acceptance rule '{parts.rule.name}', which changes the output")
    drafters = [one.drafter for one in built.values()]
    drafters[0] = WithGrammar(drafters[0], settings.free)
    drafter = Auto(
        drafters,
        list(built),
        context.target,
        settings.namespaces,
        controller=None if learned is None else learned[1].controller,
        identity=lambda: f"{_weights(context, list(built)[-1])} {settings.settings.get(list(built)[-1], {})}",
        proven=learned is not None and _proven(context, learned[0]),
    )
    controller = CombinedController([one.controller for one in built.values()], united=True)
    # The free part's draft tokens are deterministic, which the learned part's rule takes beside its own.
    return Parts(drafter, controller, None if learned is None else learned[1].rule)


def _weights(context: Context, label: str) -> str:
    """Tells the head, or the draft model, that a learned part drafts with from others beside the target."""
    for head in _heads_for(context, label)[:1]:
        return digest(head.load().named_parameters())
    if not context.bindings.draft_models:
        return label
    draft = context.draft()
    return f"{draft.num_layers}x{draft.hidden_size} {draft.dtype}"

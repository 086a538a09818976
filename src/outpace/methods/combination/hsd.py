"""Hierarchical speculative decoding (``hsd``, Mohri et al. 2025, arXiv 2510.19705).

A draft model that itself decodes speculatively drafts: with any registered method, so with a draft model of its own,
down to prompt lookup. :mod:`outpace.methods.combination.nested_decoder` has the drafter and why it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import starmap
from typing import Any, Literal, NamedTuple

from pydantic import Field

from outpace.acceptance.default import default_rule
from outpace.acceptance.registry import rules
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.validation import StrictModel
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.bindings import DRAFT_MODEL, Binding, Bindings, draft_models
from outpace.methods.combination.nested_decoder import Handover, Nested
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context, Parts, build, register
from outpace.targets.base import Target


class NestedSettings(StrictModel):
    """Settings of ``hsd``."""

    lengths: tuple[int, ...] = Field(
        (6,),
        min_length=1,
        max_length=16,
        description="draft tokens passed to the level above, from the target's level down; the last number repeats",
    )
    handover: Handover = Field("fixed", description="pass up exactly this many tokens, or all tokens of whole rounds")
    inner: str = Field("pld", description="the method with which the lowest model decodes")
    inner_settings: dict[str, Any] = Field(default_factory=dict, description="settings of the inner method")
    inner_rule: str | None = Field(
        None,
        description="acceptance rule of the inner rounds; default: the method's own. A rule that shares its "
        "noise with the drafter needs the same rule here",
    )
    levels: int | None = Field(
        None,
        ge=1,
        le=16,
        description="number of draft models that are levels, in the order named (default: all); the others are for the "
        "inner method",
    )
    hierarchy: Literal["given", "auto"] = Field(
        "given",
        description="levels and lengths as given, or those with the lowest expected latency by measured costs (as "
        "given if costs are fixed)",
    )
    acceptance: tuple[tuple[float, ...], ...] = Field(
        (), description="for auto: acceptance rate of model j's tokens by model i, the target first; default: measured"
    )


class _Level(NamedTuple):
    """A draft model, and the name that it was given."""

    name: str
    target: Target


def _stacked(context: Context, models: Seq[_Level], levels: int, lengths: Seq[int], settings: NestedSettings) -> Method:
    """The method by which models[0] decodes: the others under it, ``levels`` of them as decoders themselves."""

    def default(kind: str, name: str) -> Seq[Binding]:
        if kind == DRAFT_MODEL:
            raise BadInput(f"inner method '{settings.inner}' needs a further draft model: name one more")
        return context.bindings.default(kind, name)

    if levels:
        rule = settings.inner_rule
        below = _stacked(context, models[1:], levels - 1, lengths[1:] or lengths, settings)
        drafter, length = Nested(models[1].target, below, settings.handover, lengths[0]), _most(settings, lengths[0])
        if rule is not None:
            return Method("hsd", drafter, rules()[rule](), Fixed(length))
        return Method("hsd", drafter, default_rule(drafter.proposal), Fixed(length))
    below_it = draft_models({one.name: one.target for one in models[1:]})
    inside = replace(context, target=models[0].target, bindings=Bindings([*below_it, *context.bindings.heads], default))
    inner = build(settings.inner, inside, settings.inner_settings, settings.inner_rule)
    context.taken.extend(inner.drafts_with)
    return inner


def _most(settings: NestedSettings, length: int) -> int:
    """Tokens that may come up: a variable handover goes beyond the length that it waits for."""
    return 2 * length if settings.handover == "variable" else length


def _texts(context: Context, count: int = 4, tokens: int = 32) -> list[list[int]]:
    """Texts of the target's own, to measure acceptance on."""
    from outpace.prompts.questions import load_prompts

    target, tokenizer = context.target, context.tokenizer
    if tokenizer is None:
        prompts = [[(37 * i + 11 * one) % target.vocab_size for i in range(1, 9)] for one in range(count)]
    else:
        prompts = [tokenizer.chat([{"role": "user", "content": one.turns[0]}]) for one in load_prompts(None, count)]
    decoder, plain = Decoder(target), build("none", context)
    running = [
        decoder.submit(Request(tuple(prompt), plain, SamplingParams(temperature=1.0, seed=index), tokens))
        for index, prompt in enumerate(prompts)
    ]
    decoder.run()
    return [one.sequence.tokens for one in running]


@register(
    "hsd",
    family="combination",
    paper="Mohri et al. 2025, arXiv 2510.19705",
    needs=("draft model",),
    summary="A draft model that itself decodes speculatively with any inner method, over any number of levels.",
    when_to_use="An expensive target whose draft model is slow enough to benefit from acceleration. Not with a "
    "cheap draft model, because inner rounds take time too.",
    aliases=("hierarchical",),
    tiny={"lengths": (2,), "levels": 1, "inner": "pld", "inner_settings": {"num_draft_tokens": 2}},
)
def build_nested(context: Context, settings: NestedSettings) -> Parts:
    """The decoders under the target."""
    from outpace.controllers.hierarchy import best_hierarchy, measured_rates

    if any(length < 1 for length in settings.lengths):
        raise BadInput(f"lengths must be at least 1, not {list(settings.lengths)}")
    models, lengths = list(starmap(_Level, context.drafts())), settings.lengths
    levels = len(models) if settings.levels is None else settings.levels
    if levels > len(models):
        raise BadInput(f"{levels} levels need as many draft models; {len(models)} are named")
    if settings.hierarchy == "auto" and not context.target.costs.fixed:
        everyone = [context.target, *(one.target for one in models)]
        rates = settings.acceptance or measured_rates(everyone, _texts(context))
        best = best_hierarchy([model.costs.seconds for model in everyone], rates)
        if len(best.models) == 1:
            return Parts(NoDraft(), Fixed(0))
        models, lengths, levels = [models[one - 1] for one in best.models[1:]], best.lengths, len(best.models) - 1
    inner = _stacked(context, models, levels - 1, lengths[1:] or lengths, settings)
    drafter = Nested(models[0].target, inner, settings.handover, lengths[0])
    return Parts(drafter, Fixed(_most(settings, lengths[0])))

"""Is it lossless? Exact on small vocabularies, statistical on real models, greedy token by token.

And does a lossy rule keep its bound?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.controllers.registry import ControllerChoice
from outpace.core.callable_rooms import make_callable
from outpace.core.errors import BadInput
from outpace.core.names import unknown

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule
    from outpace.certify.certificate import Certificate
    from outpace.core.sampling import SamplingParams
    from outpace.engine.method import Method
    from outpace.heads.base import Head
    from outpace.methods.bindings import Binding
    from outpace.methods.named_weights import DraftModels, Heads
    from outpace.methods.registry import Context
    from outpace.model import Model

LEVELS = {"exact": 1.0, "statistical": 1.0, "greedy": 0.0, "bound": 1.0}
"""The levels, each with its temperature where sampling parameters are given and temperature is not."""
TOYS = ("exact", "bound")
"""Levels that need no model."""
MINIMUM_SAMPLES = 100
_SMALLEST_TOY = 3

__all__ = ["LEVELS", "certify"]


def certify(
    method: str,
    model: Model | None = None,
    *,
    level: str = "exact",
    params: SamplingParams | None = None,
    samples: int = 5000,
    alpha: float = 0.01,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    rule: str | AcceptanceRule | None = None,
    rule_settings: Mapping[str, Any] | None = None,
    draft_model: DraftModels = None,
    datastore: str | Path | None = None,
    head: Heads = None,
    controller: str | ControllerChoice | None = None,
    prompts: Sequence[str] | None = None,
    cells: int | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Certificate:
    """Certify a registered method, of this package or another.

    ``exact`` needs no model: it runs the method's tiny settings (with ``settings`` on top) on toy targets, in every
    cell of the matrix or in ``cells`` of them picked by ``seed``; a method that decodes groups of sequences is compared
    with beam sampling, or its weighted averages with the target's. ``statistical`` draws ``samples`` tokens from
    ``model``; ``greedy`` compares answers. ``bound`` needs no model either: it tests what the method's rule promises,
    at the corners of the rule's settings, where ``rule_settings`` do not name a value (``cells``: for each corner).
    ``params``: the sampling parameters to certify; None: those of the matrix, temperature 1, and temperature 0. Their
    seed is not read. A trained method drafts with the ``head`` that is named, else with a shipped one, else with an
    untrained one. ``controller``: decides how much is drafted, in place of the method's own. Raises BadInput for what
    cannot be run.
    """
    check_options(level, samples, alpha, cells)
    check_params(level, params)
    from outpace.acceptance.registry import configured_rule

    rule = configured_rule(rule, rule_settings or {})
    check_rule(level, rule)
    if level == "exact" and params is None and rule is None and controller is None:
        from outpace.certify.populations import certify_population, is_population

        if is_population(method, settings):
            return certify_population(method, settings, most=cells, on_progress=on_progress)
    check_method(method, level, settings, rule)
    choice = ControllerChoice(controller) if isinstance(controller, str) else controller
    if level == "bound":
        return _bound(method, settings, rule, choice, params, cells, on_progress)
    if level == "exact":
        return _exact(method, settings, rule, choice, params, samples, alpha, seed, cells, on_progress)
    if model is None:
        raise BadInput(f"level '{level}' decodes with a real model: give one")
    from outpace.methods.registry import build

    context = model.context(draft_model=draft_model, datastore=datastore, head=head, controller=controller)
    context, untrained = _or_untrained(context)
    built = build(method, context, settings, rule)
    check_rule(level, built.rule)
    asked = _prompts(model, prompts)

    def tell(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(done, total, level)

    if level == "greedy":
        from outpace.certify.greedy import certify_greedy

        certificate = certify_greedy(
            built, model.target, asked, stop_ids=model.eos_ids, params=params, on_progress=tell
        )
    else:
        from outpace.certify.statistical import certify_statistical

        certificate = certify_statistical(
            built, model.target, asked, samples=samples, alpha=alpha, seed=seed, params=params, on_progress=tell
        )
    if untrained:
        said = f"{certificate.verdict} (with an untrained {untrained[0]} head: none is named or shipped for this model)"
        certificate = replace(certificate, verdict=said)
    return certificate


def _or_untrained(context: Context) -> tuple[Context, list[str]]:
    """The context with an untrained head of every kind of which none is shipped, and the kinds of those that drafted.

    The list is filled while a method is built.
    """
    from outpace.heads.untrained import random_head
    from outpace.methods.bindings import DRAFT_MODEL, Binding, Bindings

    named, untrained = context.bindings, []

    def make(kind: str) -> Head:
        untrained.append(kind)
        return random_head((kind,), context.target)

    def default(kind: str, name: str) -> Sequence[Binding]:
        there = named.default(kind, name)
        return there if there or kind == DRAFT_MODEL else [Binding(name or kind, kind, partial(make, kind))]

    return replace(context, bindings=Bindings(named.named, default)), untrained


def check_options(level: str, samples: int, alpha: float, cells: int | None) -> None:
    """Raise BadInput for what is out of range; needs no model, so that a typing error costs no waiting."""
    if level not in LEVELS:
        raise unknown("level", level, list(LEVELS))
    if samples < MINIMUM_SAMPLES:
        raise BadInput(f"samples must be at least {MINIMUM_SAMPLES}, not {samples}: fewer show nothing")
    if not 0.0 < alpha < 1.0:
        raise BadInput(f"alpha must be in (0, 1), not {alpha}")
    if cells is not None and cells < 1:
        raise BadInput(f"cells must be at least 1, not {cells}")


def check_rule(level: str, rule: str | AcceptanceRule | None) -> None:
    """Raise BadInput for a rule that is lossy with its settings, at a level that tests whether the output distribution
    is unchanged."""
    if isinstance(rule, str):
        from outpace.acceptance.registry import find_rule

        rule = find_rule(rule)
    if rule is not None and not rule.exact and level != "bound":
        raise BadInput(
            f"rule '{rule.name}' is lossy, and level '{level}' tests whether a method is lossless; use --level bound, "
            "which tests what the rule promises"
        )


def check_method(
    method: str, level: str, settings: Mapping[str, Any] | None = None, rule: str | AcceptanceRule | None = None
) -> None:
    """Raise BadInput for a lossy method, unless its settings mean lossless (level 'exact'), or its rule states a bound
    (level 'bound'): it promises nothing that could be tested."""
    from outpace.certify.exact import tiny_context
    from outpace.methods.registry import build, find

    info = find(method)
    if info.lossless:
        return
    if level in TOYS:
        built = build(method, tiny_context(3, 0), {**info.tiny, **(settings or {})}, rule)
        promises = built.rule.exact or (level == "bound" and built.rule.bound is not None)
        if promises and not built.departs and built.population is None:
            return
    raise BadInput(f"method '{info.name}' is lossy and states no bound: there is nothing to certify")


def check_params(level: str, params: SamplingParams | None) -> None:
    """Raise BadInput for sampling parameters that the level cannot honour."""
    if params is None:
        return
    if level == "greedy":
        if not params.greedy:
            raise BadInput(
                f"level 'greedy' compares answers at temperature 0, not {params.temperature:g}; leave the temperature "
                "out, or take level 'statistical'"
            )
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        unused = [name for name, value in off.items() if getattr(params, name) != value]
        if unused:
            raise BadInput(
                f"level 'greedy' takes the likeliest token, which {', '.join(unused)} cannot change; leave it out, or "
                "take level 'statistical'"
            )
    if level == "statistical" and params.greedy:
        raise BadInput(
            "level 'statistical' tests tokens that were drawn, and at temperature 0 none is; give a temperature above "
            "0, or take level 'greedy'"
        )
    if level in TOYS and any(not 0 <= token < _SMALLEST_TOY for token in params.logit_bias):
        raise BadInput(
            f"level '{level}' decodes with toy targets of {_SMALLEST_TOY} tokens and more: a logit bias must be of "
            f"token 0 to {_SMALLEST_TOY - 1}, not {', '.join(map(str, params.logit_bias))}; take level 'statistical'"
        )


def _exact(
    name: str,
    settings: Mapping[str, Any] | None,
    rule: str | AcceptanceRule | None,
    controller: ControllerChoice | None,
    params: SamplingParams | None,
    samples: int,
    alpha: float,
    seed: int,
    cells: int | None,
    on_progress: Callable[[int, int, str], None] | None,
) -> Certificate:
    from outpace.certify.exact import SAMPLING, Setting, cells_of, certify_exact, rotating_slice, tiny_context
    from outpace.methods.registry import build, find

    tiny = {**find(name).tiny, **(settings or {})}
    numbers = count()

    def make(context: Context) -> Method:
        return build(name, replace(context, controller=controller), tiny, rule)

    first = make(tiny_context(3, 0))
    check_rule("exact", first.rule)
    sampling = _sampling(first.rule, params, SAMPLING)
    chosen = cells_of(first, sampling=sampling)
    if cells is not None:
        chosen = rotating_slice(chosen, seed, cells, sampling)

    def tell(setting: Setting) -> None:
        if on_progress is not None:
            on_progress(next(numbers), len(chosen), str(setting))

    certificate = certify_exact(
        name, make, chosen, sampling=sampling, samples=samples, alpha=alpha, seed=seed, on_progress=tell
    )
    if certificate.lossless and not find(name).lossless:
        certificate = replace(certificate, verdict=f"{certificate.verdict}; only with {first.rule.described}")
    return certificate if params is None else replace(certificate, sampling=params.described)


def _bound(
    name: str,
    settings: Mapping[str, Any] | None,
    rule: str | AcceptanceRule | None,
    controller: ControllerChoice | None,
    params: SamplingParams | None,
    cells: int | None,
    on_progress: Callable[[int, int, str], None] | None,
) -> Certificate:
    from outpace.certify.bound import MATRIX, certify_bound
    from outpace.certify.exact import tiny_context
    from outpace.methods.bindings import split_rule
    from outpace.methods.registry import build, canonical, find

    tiny = {**find(name).tiny, **(settings or {})}
    drafting = split_rule(canonical(name))[0]  # a rule in the label would count before that of a corner

    def make(context: Context, rule: AcceptanceRule) -> Method:
        return build(drafting, replace(context, controller=controller), tiny, rule)

    judge = build(name, tiny_context(3, 0), tiny, rule).rule
    sampling = _sampling(judge, params, MATRIX)
    certificate = certify_bound(name, make, judge, sampling=sampling, most=cells, on_progress=on_progress)
    return certificate if params is None else replace(certificate, sampling=params.described)


def _sampling(
    rule: AcceptanceRule, params: SamplingParams | None, matrix: Mapping[str, SamplingParams]
) -> Mapping[str, SamplingParams]:
    """What toy targets are decoded with: the parameters that were given, or those of the matrix that the rule takes."""
    if params is not None:
        return {params.described: params}
    return {name: one for name, one in matrix.items() if one.greedy or not rule.greedy_only}


def _prompts(model: Model, prompts: Sequence[str] | None) -> list[list[int]]:
    from outpace.prompts.questions import load_prompts

    texts = list(prompts) if prompts else [prompt.turns[0] for prompt in load_prompts(None, 14)]
    return [model.tokenizer.chat([{"role": "user", "content": text}]) for text in texts]


make_callable(__name__, f"{__name__}:certify")

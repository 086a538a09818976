"""Method = drafter + acceptance rule + controller, declared once, found by name.

A method is declared beside its drafter, in one file::

    class Settings(BaseModel):
        num_draft_tokens: int = Field(8, ge=0, description="draft tokens a round")

    @register("my-method", family="model-free", paper="Doe 2026, arXiv 2601.00001", summary="...")
    def build(context: Context, settings: Settings) -> Parts:
        return Parts(MyDrafter(), Fixed(settings.num_draft_tokens))

Packages outside outpace do the same in a module that they name under the entry point group ``outpace.methods``.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from outpace.core.errors import BadInput
from outpace.core.names import normalised, unknown
from outpace.core.plugins import import_all
from outpace.methods.bindings import split, split_rule
from outpace.methods.context import Context, Parts
from outpace.methods.method_info import MethodInfo, Need, NoSettings, configured, present_names

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule
    from outpace.engine.method import Method

__all__ = [
    "Context",
    "MethodInfo",
    "NoSettings",
    "Parts",
    "build",
    "canonical",
    "configured",
    "drafting_with",
    "find",
    "methods",
    "present_names",
    "register",
    "routers",
]

_REGISTRY: dict[str, MethodInfo] = {}
"""By normalised name and alias."""


def register(
    name: str,
    *,
    family: str,
    paper: str,
    summary: str,
    head: str | None = None,
    lossless: bool = True,
    when_to_use: str = "",
    aliases: tuple[str, ...] = (),
    needs: tuple[Need, ...] = (),
    optional: tuple[Need, ...] = (),
    routes: bool = False,
    tiny: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Parts]], Callable[..., Parts]]:
    """Declare a method; the decorated function builds it from a Context and its settings model.

    ``head``: the kind of trained head that it drafts with; it is among the method's needs. ``needs``: what else the
    caller supplies; ``optional``: what it drafts with too where that is there. ``routes``: it predicts when an answer
    is complete. ``tiny``: settings under which ``outpace certify`` can enumerate the method on a toy target.
    Raises BadInput for a name or alias that another method has.
    """

    def declare(build: Callable[..., Parts]) -> Callable[..., Parts]:
        settings = _settings_of(build)
        needed: tuple[Need, ...] = (*needs, "head") if head is not None else needs
        info = MethodInfo(
            *(name, family, paper, summary, build, settings, head, lossless, when_to_use, aliases, needed),
            *(optional, routes, tiny or {}),
        )
        for key in (name, *aliases):
            before = _REGISTRY.get(normalised(key), info)
            if (before.name, before.build.__module__) != (name, build.__module__):  # the same again is a reload
                raise BadInput(
                    f"two methods register the name '{key}': '{before.name}' of {before.build.__module__} "
                    f"and '{name}' of {build.__module__}"
                )
        _REGISTRY.update(dict.fromkeys(map(normalised, (name, *aliases)), info))
        return build

    return declare


def _settings_of(build: Callable[..., Parts]) -> type[BaseModel]:
    """The settings model in a build function's signature.

    The other annotations are left alone: a method's module may import what they name for type checkers only.
    """
    hint = build.__annotations__.get("settings", NoSettings)
    found = typing.get_type_hints(SimpleNamespace(__annotations__={"settings": hint}), build.__globals__)
    model: type[BaseModel] = found["settings"]
    return model


@cache
def _discover() -> None:
    import_all("outpace.methods", entry="method")
    for point in entry_points(group="outpace.methods"):
        try:
            point.load()
        except Exception as error:
            why = " ".join(str(error).split())
            raise BadInput(f"the methods of entry point '{point.name}' ({point.value}) do not load: {why}") from error


def methods() -> list[MethodInfo]:
    """Every registered method, ``none`` (autoregressive decoding) first, then by family and name."""
    _discover()
    unique = {info.name: info for info in _REGISTRY.values()}
    return sorted(unique.values(), key=lambda info: (info.name != "none", info.family, info.name))


def find(label: str) -> MethodInfo:
    """The method of this name or alias, with ``#NAME`` or without; case, '-' and '_' do not matter.

    Raises BadInput with the nearest names.
    """
    _discover()
    method, name = split(label)
    info = _REGISTRY.get(normalised(method))
    if info is None:
        written = {name: one.name for one in methods() for name in (one.name, *one.aliases)}
        raise unknown("method", method, written, see="outpace methods")
    if "#" in label and not name:
        raise BadInput(f"'{label}' has no name after '#': write {method}#NAME")
    return info


def canonical(label: str) -> str:
    """A label with the method's and the rule's own names in place of aliases.

    Raises BadInput as :func:`find` does, and for a rule that does not exist or does not have the settings.
    """
    name, rule = split(label)[1], split_rule(label)[1]
    if rule:
        from outpace.acceptance.rule_text import parse_rule, rule_text

        rule = f"@{rule_text(*parse_rule(rule))}"
    return find(label).name + (f"#{name}" if name else "") + rule


def drafting_with(kind: str) -> list[str]:
    """Names of the methods that draft with a head of this kind, the one of the kind's name first."""
    return sorted((info.name for info in methods() if info.head == kind), key=lambda name: name != kind)


def routers() -> list[str]:
    """Names of the methods that predict when an answer is complete."""
    return [info.name for info in methods() if info.routes]


def build(
    name: str, context: Context, settings: Mapping[str, Any] | None = None, rule: str | AcceptanceRule | None = None
) -> Method:
    """Build a method by name or label. Raises BadInput for unknown names or settings and for parts that do not fit.

    A rule in the label counts before ``rule``.
    """
    from outpace.acceptance.default import default_rule
    from outpace.acceptance.registry import find_rule
    from outpace.engine.method import Method

    info = find(name)
    label = canonical(name)
    choice = context.controller
    context = replace(context, label=context.bindings.bound(label, info.kinds), taken=[], controller=None)
    parts = info.build(context, configured(info, settings or {}))
    if choice is not None:
        from outpace.methods.chosen_controller import controlled

        parts = controlled(label, parts, context, choice)
    if own := split_rule(label)[1]:
        from outpace.acceptance.rule_text import rule_from

        rule = rule_from(own)
    if isinstance(rule, str):
        rule = find_rule(rule)
    if rule is not None and parts.population is not None:
        raise BadInput(f"method '{info.name}' decides about a group of sequences by its own rule; leave out rule")
    judge = (rule or parts.rule or default_rule(parts.drafter.proposal)).for_target(context.target)
    used = tuple(dict.fromkeys(context.taken))
    return Method(
        label, parts.drafter, judge, parts.controller, info.family, used, parts.prepare, parts.departs, parts.population
    )

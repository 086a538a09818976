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
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from outpace.core.errors import BadInput
from outpace.core.names import did_you_mean, normalised, unknown
from outpace.core.plugins import import_all
from outpace.core.validation import StrictModel, known_fields, validated
from outpace.methods.bindings import DRAFT_MODEL, Binding, Bindings, DraftModelChoice, split, split_rule

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule
    from outpace.controllers.base import Controller
    from outpace.controllers.registry import ControllerChoice
    from outpace.datastore.store import Datastore
    from outpace.drafting.base import Drafter
    from outpace.engine.method import Method
    from outpace.engine.populations.base import Population
    from outpace.engine.request import Request
    from outpace.heads.base import Head
    from outpace.models.base import ChatTokenizer
    from outpace.targets.base import Target

Need = Literal["draft model", "head", "datastore", "reference", "gate"]
"""``--draft-model``, ``--head``, ``--datastore``, ``--reference``; the setting ``gate``. The first two are shipped for
some targets."""

_BOUND = ("draft model", "head")
"""Needs that a binding meets."""
_OLD_NAMES = {"length": "num_draft_tokens", "nodes": "max_nodes", "k": "topk", "width": "topk"}
"""Settings of outpace 0.1 and what they are called now."""


class NoSettings(StrictModel):
    """A method without settings."""


def _no_datastore() -> Datastore:
    raise BadInput(
        "this method copies from a datastore: build one with 'outpace datastore build FILES --out PATH', "
        "and give --datastore PATH"
    )


@dataclass(frozen=True, slots=True)
class Context:
    """What a method may be built from: the target, and what the caller supplied beside it.

    ``bindings`` are the draft models and heads that were named or are shipped; ``tokenizer`` is the target's;
    ``datastore`` opens the corpus that was named. ``label`` is what the method that is being built is called,
    ``METHOD`` or ``METHOD#NAME``, and ``taken`` are the draft models and heads that it was given, in words.
    ``controller``: the one that the caller chose in place of methods' own.
    """

    target: Target
    bindings: Bindings = field(default_factory=Bindings)
    tokenizer: ChatTokenizer | None = None
    datastore: Callable[[], Datastore] = _no_datastore
    label: str = ""
    taken: list[str] = field(default_factory=list)
    controller: ControllerChoice | None = None

    @property
    def has_datastore(self) -> bool:
        """Whether a datastore was named: for methods that copy from one where there is one."""
        return self.datastore is not _no_datastore

    def draft(self) -> Target:
        """The draft model, over the target's vocabulary: that of the method's name, or the first.

        Raises BadInput where there is none, and for one of another vocabulary size.
        """
        return self._fitting(self.bindings.need(DRAFT_MODEL, self.label)[0])

    def drafts(self) -> list[tuple[str, Target]]:
        """All draft models by name, over the target's vocabulary. Raises BadInput as :meth:`draft` does."""
        return [(one.name, self._fitting(one)) for one in self.bindings.need(DRAFT_MODEL, self.label)]

    def draft_choice(self) -> DraftModelChoice:
        """The draft model as it is, over its own vocabulary and with its tokenizer. Raises BadInput for none."""
        found = self.bindings.need(DRAFT_MODEL, self.label)[0]
        if found.choice is None:
            raise BadInput(f"method '{self.label}' needs a draft model with its tokenizer: give --draft-model NAME")
        choice = found.choice()
        self.taken.append(str(found))
        return choice

    def head(self, kind: str) -> Head:
        """The trained head of this kind: that of the method's name, the first that was named, or a shipped one.

        Raises BadInput where there is none, and for one that does not fit the target.
        """
        found = self.bindings.need(kind, self.label)[0]
        head: Head = found.load()
        self.taken.append(str(found))
        return head

    def parts(self, label: str, settings: Mapping[str, Any] | None = None) -> Parts:
        """Another method's parts, for methods made of methods. Raises BadInput as :func:`build`, and for a rule."""
        if rule := split_rule(label)[1]:
            raise BadInput(f"'{label}' is part of a method, which judges by one rule of its own; leave out '@{rule}'")
        info = find(label)
        if not info.lossless:
            raise BadInput(f"'{info.name}' is lossy, and no part of another method")
        parts = info.build(replace(self, label=label), configured(info, settings or {}))
        if parts.departs:
            raise BadInput(f"'{info.name}' is lossy whatever its rule, and no part of another method")
        return parts

    def _fitting(self, one: Binding) -> Target:
        draft: Target = one.load()
        if draft.vocab_size != self.target.vocab_size:
            raise BadInput(
                f"the draft model has {draft.vocab_size} tokens and the target {self.target.vocab_size}; "
                "choose a draft model with the target's vocabulary"
            )
        self.taken.append(str(one))
        return draft


@dataclass(frozen=True, slots=True)
class Parts:
    """What a method consists of. ``rule`` judges at temperature > 0; None: the default for the drafter's trees.
    ``prepare``, ``departs`` and ``population`` as in :class:`~outpace.engine.method.Method`, for methods whose answers
    are not the target's own."""

    drafter: Drafter[Any]
    controller: Controller
    rule: AcceptanceRule | None = None
    prepare: Callable[[Request], Request] | None = None
    departs: str = ""
    population: Callable[[Request], Population] | None = None


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """A registered method."""

    name: str
    family: str
    paper: str
    summary: str
    build: Callable[[Context, Any], Parts]
    settings: type[BaseModel]
    head: str | None = None
    """The kind of trained head that it drafts with."""
    lossless: bool = True
    when_to_use: str = ""
    """When it decodes faster than autoregressive decoding, and when it does not."""
    aliases: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    """What it cannot draft without, or copies from before anything else."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """Settings that make a method small enough for exact certification on a toy target."""

    @property
    def trained(self) -> bool:
        """Whether it drafts with something that is trained for the target."""
        return self.head is not None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of bindings that it drafts with by itself."""
        return tuple(DRAFT_MODEL if need == "draft model" else self.head or "" for need in self.needs if need in _BOUND)

    def setting_names(self) -> dict[str, str]:
        """What a user may write, and the setting that it means: the settings' own names, and their earlier ones."""
        fields = self.settings.model_fields
        names = {name: name for name in fields} | {one.alias: one.alias for one in fields.values() if one.alias}
        for old, new in _OLD_NAMES.items():
            if old not in names and new in names:
                names[old] = new
        return names

    def public(self) -> dict[str, Any]:
        """The entry of ``outpace methods --json``."""
        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "family": self.family,
            "paper": self.paper,
            "lossless": self.lossless,
            "trained": self.trained,
            "needs": list(self.needs),
            "summary": self.summary,
            "when_to_use": self.when_to_use,
            **({} if self.lossless else {"bound": None}),
        }


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
    tiny: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Parts]], Callable[..., Parts]]:
    """Declare a method; the decorated function builds it from a Context and its settings model.

    ``head``: the kind of trained head that it drafts with; it is among the method's needs. ``needs``: what else the
    caller supplies. ``tiny``: settings under which ``outpace certify`` can enumerate the method on a toy target.
    Raises BadInput for a name or alias that another method has.
    """

    def declare(build: Callable[..., Parts]) -> Callable[..., Parts]:
        settings = _settings_of(build)
        needed: tuple[Need, ...] = (*needs, "head") if head is not None else needs
        info = MethodInfo(
            name, family, paper, summary, build, settings, head, lossless, when_to_use, aliases, needed, tiny or {}
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


def present_names(info: MethodInfo, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names that they have now. Raises BadInput for one that the method does not have."""
    names = info.setting_names()
    for key in settings:  # pydantic ignores unknown ones unless a method's author says otherwise
        if key not in names:
            near = did_you_mean(key, names)
            raise BadInput(
                f"method '{info.name}' has no setting '{key}'{near and '; '}{near} "
                f"(settings: {known_fields(info.settings)})"
            )
        if names[key] != key and names[key] in settings:
            raise BadInput(f"method '{info.name}': '{key}' is the earlier name of '{names[key]}'; give one of the two")
    return {names[key]: value for key, value in settings.items()}


def configured(info: MethodInfo, settings: Mapping[str, Any]) -> BaseModel:
    """A method's settings, checked, also under their earlier names. Raises BadInput that names the setting."""

    def refusal(key: str, reason: str) -> BadInput:
        return BadInput(f"method '{info.name}', setting '{key}': {reason} (settings: {known_fields(info.settings)})")

    return validated(info.settings, present_names(info, settings), refusal)


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
    judge = (rule or parts.rule or default_rule(parts.drafter.proposal)).for_target(context.target)
    used = tuple(dict.fromkeys(context.taken))
    return Method(
        label, parts.drafter, judge, parts.controller, info.family, used, parts.prepare, parts.departs, parts.population
    )

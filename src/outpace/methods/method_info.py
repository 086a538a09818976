"""What a registered method declares of itself, and how its settings are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from outpace.core.errors import BadInput
from outpace.core.names import did_you_mean
from outpace.core.validation import StrictModel, known_fields, validated
from outpace.methods.bindings import DRAFT_MODEL

if TYPE_CHECKING:
    from outpace.methods.context import Context, Parts

Need = Literal["draft model", "head", "datastore", "reference", "gate"]
"""``--draft-model``, ``--head``, ``--datastore``, ``--reference``; the setting ``gate``. The first two are shipped for
some targets."""

_BOUND = ("draft model", "head")
"""Needs that a binding meets."""
_OLD_NAMES = {"length": "num_draft_tokens", "nodes": "max_nodes", "k": "topk", "width": "topk"}
"""Settings of outpace 0.1 and what they are called now."""


class NoSettings(StrictModel):
    """A method without settings."""


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
    optional: tuple[Need, ...] = ()
    """What it drafts with too where the caller names it, or where it is shipped."""
    routes: bool = False
    """Whether it predicts when an answer is complete (``Drafter.expected_seconds``), by which a server chooses a model
    among several."""
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

    def takes(self, what: Need) -> bool:
        """Whether it drafts with this, or can."""
        return what in (*self.needs, *self.optional)

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

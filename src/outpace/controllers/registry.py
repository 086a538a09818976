"""The registry of controllers: every module of this package is imported, every named controller is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from outpace.controllers.named import NamedController
from outpace.core.errors import BadInput
from outpace.core.names import normalised, unknown
from outpace.core.plugins import import_all
from outpace.core.validation import known_fields, validated


@dataclass(frozen=True, slots=True)
class ControllerChoice:
    """A controller that a caller names, and its settings. ``bench``: whether a bench asks, which knows the answers."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    bench: bool = False


def controllers() -> list[type[NamedController]]:
    """Every named controller, by name."""
    import_all("outpace.controllers")
    found: dict[str, type[NamedController]] = {}
    pending = list(NamedController.__subclasses__())
    while pending:
        kind = pending.pop()
        pending.extend(kind.__subclasses__())
        if "name" in kind.__dict__:
            found[kind.name] = kind
    return [found[name] for name in sorted(found)]


def find_controller(name: str) -> type[NamedController]:
    """The controller of this name or alias; case, '-' and '_' do not matter. Raises BadInput with the nearest names."""
    known = {written: kind for kind in controllers() for written in (kind.name, *kind.aliases)}
    for written, kind in known.items():
        if normalised(written) == normalised(name):
            return kind
    raise unknown("controller", name, {written: kind.name for written, kind in known.items()}, "outpace controllers")


def configured(choice: ControllerChoice) -> tuple[type[NamedController], BaseModel]:
    """The controller that was chosen and its settings, checked. Raises BadInput that names the setting."""
    kind = find_controller(choice.name)

    def refusal(key: str, reason: str) -> BadInput:
        return BadInput(
            f"controller '{kind.name}', setting '{key}': {reason} (settings: {known_fields(kind.Settings)})"
        )

    found = kind, validated(kind.Settings, choice.settings, refusal)
    if kind.bench_only and not choice.bench:
        raise BadInput(f"controller '{kind.name}' knows the answer beforehand; it is for 'outpace bench' alone")
    return found

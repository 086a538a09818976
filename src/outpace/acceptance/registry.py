"""The registry of acceptance rules: every module of this package is imported, every named rule is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.core.errors import BadInput
from outpace.core.names import did_you_mean, normalised, unknown
from outpace.core.plugins import import_all
from outpace.core.validation import known_fields, validated


def rules() -> dict[str, type[AcceptanceRule]]:
    """Every acceptance rule by name and by alias."""
    import_all("outpace.acceptance")
    found: dict[str, type[AcceptanceRule]] = {}
    pending = list(AcceptanceRule.__subclasses__())
    while pending:
        rule = pending.pop()
        pending.extend(rule.__subclasses__())
        if "name" in rule.__dict__:
            found[rule.name] = rule
            found.update(dict.fromkeys(rule.aliases, rule))
    return dict(sorted(found.items()))


def all_rules() -> list[type[AcceptanceRule]]:
    """Every acceptance rule once, lossless ones first, then by name."""
    return sorted(dict.fromkeys(rules().values()), key=lambda rule: (not rule.lossless, rule.name))


def find_rule(name: str, settings: Mapping[str, Any] | None = None) -> AcceptanceRule:
    """The rule of this name or alias, with ``settings``; case, '-' and '_' do not matter.

    Raises BadInput with the nearest names, and for settings that the rule does not have or that are out of range.
    """
    known = rules()
    for one, rule in known.items():
        if normalised(one) == normalised(name):
            return configured(rule, settings or {})
    raise unknown("acceptance rule", name, list(known), see="outpace rules")


def configured_rule(rule: str | AcceptanceRule | None, settings: Mapping[str, Any]) -> str | AcceptanceRule | None:
    """A rule as callers give it, with settings where there are any. Raises BadInput as :func:`find_rule` does, and for
    settings without the name of a rule."""
    if not settings:
        return rule
    if not isinstance(rule, str):
        raise BadInput("settings of a rule belong to a rule that is given by name; name one (see: outpace rules)")
    return find_rule(rule, settings)


def configured(rule: type[AcceptanceRule], settings: Mapping[str, Any]) -> AcceptanceRule:
    """The rule with these settings. Raises BadInput for those that it does not have or that are out of range."""
    fields = rule.Settings.model_fields
    for key in settings:
        if key not in fields:
            near = did_you_mean(key, list(fields))
            raise BadInput(
                f"rule '{rule.name}' has no setting '{key}'{near and '; '}{near} (settings: "
                f"{known_fields(rule.Settings)})"
            )

    def refusal(key: str, reason: str) -> BadInput:
        return BadInput(f"rule '{rule.name}', setting '{key}': {reason} (settings: {known_fields(rule.Settings)})")

    checked = validated(rule.Settings, settings, refusal)
    return rule(checked) if fields else rule()  # type: ignore[call-arg]


def public(rule: type[AcceptanceRule]) -> dict[str, Any]:
    """The entry of ``outpace rules --json``; ``bound``: with the default settings."""
    bound = rule().bound
    schema = rule.Settings.model_json_schema()["properties"] if rule.Settings.model_fields else {}
    return {
        "name": rule.name,
        "aliases": list(rule.aliases),
        "lossless": rule.lossless,
        "bound": None if bound is None else bound.public(),
        "paper": rule.paper,
        "summary": summary(rule),
        "settings": [
            {"name": name, **{key: value for key, value in one.items() if key != "title"}}
            for name, one in schema.items()
        ],
    }


def summary(rule: type[AcceptanceRule]) -> str:
    """What a rule does: the first paragraph of its docstring."""
    return " ".join((rule.__doc__ or "").strip().partition("\n\n")[0].split())

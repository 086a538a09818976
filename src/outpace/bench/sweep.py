"""Sweeps: one method in several rows of a bench, each with other values of its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from outpace.acceptance.registry import rules
from outpace.acceptance.rule_text import parse_rule, rule_text
from outpace.core.errors import BadInput
from outpace.core.names import did_you_mean, normalised
from outpace.methods.bindings import split, split_rule
from outpace.methods.registry import canonical, configured, find

MOST = 64
"""Rows that sweeps may add up to."""

Sweep = Mapping[str, Sequence[Any]]
"""Values of settings: ``{"pld.num_draft_tokens": [2, 4, 8]}``; without ``pld.`` of all methods that have it."""


def swept(methods: Mapping[str, Mapping[str, Any]], sweep: Sweep) -> dict[str, dict[str, Any]]:
    """The rows, by label with their settings: ``pld#num_draft_tokens=2`` and so on in place of ``pld``.

    Settings of a row's rule are swept alike, as ``KEY`` or ``RULE.KEY``: ``pld@top-beta(tau=0.5)`` and so on in place
    of ``pld@top-beta``. Several sweeps of one method make a row for each combination. Raises BadInput for a setting
    that no method has, for one that is also set, for values that a method refuses, and for more rows than ``MOST``.
    """
    methods = {canonical(label): settings for label, settings in methods.items()}
    values: dict[str, dict[str, Sequence[Any]]] = {label: {} for label in methods}
    for key, given in sweep.items():
        if isinstance(given, str) or not given:
            raise BadInput(f"sweep of '{key}': give at least one value, as a list")
        for label, setting in _takers(key, methods):
            fixed = {**methods[label], **_rule_settings(label)[1]}
            if setting in fixed:
                raise BadInput(f"'{setting}' of {label} is swept and set to {fixed[setting]}; leave one out")
            values[label][setting] = given
    rows: dict[str, dict[str, Any]] = {}
    for label, settings in methods.items():
        names = find(label).setting_names()
        for chosen in product(*values[label].values()):
            own = dict(zip(values[label], chosen, strict=True))
            mine = {key: value for key, value in own.items() if key in names}
            rows[_label(label, mine, {key: own[key] for key in own if key not in names})] = {**settings, **mine}
    if sweep and len(rows) > MOST:
        raise BadInput(f"the sweeps make {len(rows)} rows, more than {MOST}; give fewer values, or fewer methods")
    for label, settings in rows.items():
        configured(find(label), settings)
        _rule_settings(label)
    return rows


def _rule_settings(label: str) -> tuple[str, dict[str, Any]]:
    """The name of a row's rule ("" for none) and its settings. Raises BadInput for settings out of range."""
    rule = split_rule(label)[1]
    return parse_rule(rule) if rule else ("", {})


def _settings_of(label: str) -> dict[str, str]:
    """What may be swept of a row, and the setting that it means; a method's setting hides its rule's of that name."""
    rule = _rule_settings(label)[0]
    fields = rules()[rule].Settings.model_fields if rule else ()
    return {name: name for name in fields} | find(label).setting_names()


def _takers(key: str, methods: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(label, setting) of the methods that a sweep is for."""
    label, dot, name = key.rpartition(".")
    rule = _rule_named(label)
    judged = [one for one in methods if rule and _rule_named(_rule_settings(one)[0]) == rule]
    if dot and not judged and _method(key, label, methods) not in methods:
        hint = did_you_mean(label, list(methods)) or f"compared: {', '.join(methods)}"
        raise BadInput(f"sweep of '{key}': '{label}' is not among the compared methods; {hint}")
    wanted = judged or ([canonical(label)] if dot else list(methods))
    names = {one: _settings_of(one) for one in wanted}
    found = [(one, names[one][name]) for one in wanted if name in names[one]]
    if not found:
        near = did_you_mean(name, {written: meant for one in names.values() for written, meant in one.items()})
        raise BadInput(f"sweep of '{key}': no compared method has the setting '{name}'" + (near and f"; {near}"))
    return found


def _rule_named(name: str) -> str:
    """The rule that a name or an alias means; "" for none."""
    return next((rule.name for one, rule in rules().items() if normalised(one) == normalised(name)), "")


def _method(key: str, label: str, methods: Mapping[str, Any]) -> str:
    """The method that a sweep names. Raises BadInput for a name that is none, or that of a rule."""
    try:
        return canonical(label)
    except BadInput:
        rule = _rule_named(label)
        if not rule:
            raise
        example = f"{split_rule(next(iter(methods)))[0]}@{rule}"
        raise BadInput(
            f"sweep of '{key}': rule '{rule}' is not among those of the compared methods; compare {example}"
        ) from None


def _label(label: str, own: Mapping[str, Any], rule: Mapping[str, Any]) -> str:
    """A label that says what is swept. What stands after a comma never names a draft model or a head."""
    name, settings = _rule_settings(label)
    behind = f"@{rule_text(name, {**settings, **rule})}" if name else ""
    label = split_rule(label)[0]
    if not own:
        return label + behind
    said = ",".join(f"{name}={_text(value)}" for name, value in own.items())
    return (f"{label},{said}" if split(label)[1] else f"{label}#{said}") + behind


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)

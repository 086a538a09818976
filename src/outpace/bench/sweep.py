"""Sweeps: one method in several rows of a bench, each with other values of its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.names import did_you_mean
from outpace.methods.bindings import split
from outpace.methods.registry import canonical, configured, find

MOST = 32
"""Rows that sweeps may add up to."""

Sweep = Mapping[str, Sequence[Any]]
"""Values of settings: ``{"pld.num_draft_tokens": [2, 4, 8]}``; without ``pld.`` of all methods that have it."""


def swept(methods: Mapping[str, Mapping[str, Any]], sweep: Sweep) -> dict[str, dict[str, Any]]:
    """The rows, by label with their settings: ``pld#num_draft_tokens=2`` and so on in place of ``pld``.

    Several sweeps of one method make a row for each combination. Raises BadInput for a setting that no method has, for
    one that is also set, for values that a method refuses, and for more rows than ``MOST``.
    """
    methods = {canonical(label): settings for label, settings in methods.items()}
    values: dict[str, dict[str, Sequence[Any]]] = {label: {} for label in methods}
    for key, given in sweep.items():
        if isinstance(given, str) or not given:
            raise BadInput(f"sweep of '{key}': give at least one value, as a list")
        for label, setting in _takers(key, methods):
            if setting in methods[label]:
                raise BadInput(f"'{setting}' of {label} is swept and set to {methods[label][setting]}; leave one out")
            values[label][setting] = given
    rows: dict[str, dict[str, Any]] = {}
    for label, settings in methods.items():
        for chosen in product(*values[label].values()):
            own = dict(zip(values[label], chosen, strict=True))
            rows[_label(label, own)] = {**settings, **own}
    if len(rows) > MOST:
        raise BadInput(f"the sweeps make {len(rows)} rows, more than {MOST}; give fewer values, or fewer methods")
    for label, settings in rows.items():
        configured(find(label), settings)
    return rows


def _takers(key: str, methods: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(label, setting) of the methods that a sweep is for."""
    label, dot, name = key.rpartition(".")
    if dot and canonical(label) not in methods:
        hint = did_you_mean(label, list(methods)) or f"compared: {', '.join(methods)}"
        raise BadInput(f"sweep of '{key}': '{label}' is not among the compared methods; {hint}")
    wanted = [canonical(label)] if dot else list(methods)
    names = {one: find(one).setting_names() for one in wanted}
    found = [(one, names[one][name]) for one in wanted if name in names[one]]
    if not found:
        near = did_you_mean(name, {written: meant for one in names.values() for written, meant in one.items()})
        raise BadInput(f"sweep of '{key}': no compared method has the setting '{name}'" + (near and f"; {near}"))
    return found


def _label(label: str, own: Mapping[str, Any]) -> str:
    """A label that says what is swept. What stands after a comma never names a draft model or a head."""
    if not own:
        return label
    said = ",".join(f"{name}={_text(value)}" for name, value in own.items())
    return f"{label},{said}" if split(label)[1] else f"{label}#{said}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)

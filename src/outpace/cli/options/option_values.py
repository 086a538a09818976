"""Values that an option holds several of: KEY=VALUE pairs, lists with commas, settings of methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.core.names import did_you_mean, split_outside_brackets


def names(text: str | None) -> list[str]:
    """The names in a list with commas; those in brackets belong to one name."""
    return split_outside_brackets(text or "")


def settings_by_method(
    pairs: Sequence[str] | None, known: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, Any]]:
    """``--param`` values for each chosen method.

    ``known``: for each method, what may be written and the setting that it means. ``key=value`` goes to every method
    that has the key, ``method.key=value`` to that one. Raises BadInput for a key that no chosen method has.
    """
    settings: dict[str, dict[str, Any]] = {name: {} for name in known}
    for pair in pairs or ():
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise BadInput(f"--param takes KEY=VALUE or METHOD.KEY=VALUE, not '{pair}'")
        method, dot, setting = key.rpartition(".")
        wanted = [method] if dot else list(known)
        if dot and method not in known:
            near = did_you_mean(method, known) or f"chosen: {', '.join(known)}"
            raise BadInput(f"--param {pair}: method '{method}' is not among the chosen ones; {near}")
        takers = [name for name in wanted if setting in known[name]]
        if not takers:
            have = "; ".join(f"{name}: {', '.join(dict.fromkeys(known[name].values())) or 'none'}" for name in wanted)
            near = did_you_mean(setting, {one: meant for name in wanted for one, meant in known[name].items()})
            hint = f"; {near}" if near else ""
            raise BadInput(f"--param {pair}: no chosen method has the setting '{setting}'{hint} (settings of {have})")
        for name in takers:
            settings[name][known[name][setting]] = _value(pair, text)
    return settings


def key_values(flag: str, pairs: Sequence[str] | None) -> dict[str, str]:
    """KEY=VALUE pairs of ``flag``. Raises BadInput for what has another form, and for a key that is given twice."""
    found: dict[str, str] = {}
    for pair in pairs or ():
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise BadInput(f"{flag} takes KEY=VALUE, not '{pair}'")
        if key in found:
            raise BadInput(f"{flag} gives '{key}' twice; give it once")
        found[key] = text
    return found


def rule_settings(pairs: Sequence[str] | None) -> dict[str, Any]:
    """``--rule-param`` values by key. Raises BadInput as :func:`key_values`, and for invalid JSON."""
    return {key: _value(f"{key}={text}", text) for key, text in key_values("--rule-param", pairs).items()}


def sweeps(given: Sequence[str]) -> dict[str, list[Any]]:
    """``--sweep KEY=V1,V2,...`` by KEY, which may be METHOD.KEY; values that hold commas as a JSON list.

    Raises BadInput for what has another form, and for a key that is given twice.
    """
    found: dict[str, list[Any]] = {}
    for pair in given:
        key, sign, text = pair.partition("=")
        values = _value(pair, text) if text.startswith("[") else names(text)
        if not sign or not key or not values:
            raise BadInput(f"--sweep takes KEY=V1,V2,... or METHOD.KEY=V1,V2,..., not '{pair}'")
        if key in found:
            raise BadInput(f"--sweep gives '{key}' twice; list all its values once")
        found[key] = values
    return found


def _value(pair: str, text: str) -> Any:
    """Numbers and words are read by the setting's own type; lists and objects are JSON."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        key = pair.partition("=")[0]  # the value may be long
        raise BadInput(f"--param {key}: the value is not valid JSON: {error}") from None


def check_time_limit(seconds: float) -> None:
    """Raise BadInput for a limit of a request's time that is not a number above 0."""
    if not 0 < seconds < math.inf:
        raise BadInput(f"--time-limit must be a number of seconds above 0, not {seconds:g}")

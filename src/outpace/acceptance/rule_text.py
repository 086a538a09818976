"""A rule with its settings as one text: ``top-beta(tau=0.5)``, which stands behind ``@`` in a method's label."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.registry import find_rule
from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.core.names import number_text, split_outside_brackets

_FORM = re.compile(r"([\w-]+)(?:\((.*)\))?", re.DOTALL)


def parse_rule(text: str) -> tuple[str, dict[str, Any]]:
    """The rule's own name and the settings that are written. Raises BadInput for what does not exist or is not so."""
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise BadInput(f"'{text}' is not a rule: write RULE or RULE(KEY=VALUE,...)")
    settings: dict[str, Any] = {}
    for pair in split_outside_brackets(form[2] or ""):
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise BadInput(f"rule '{text}': settings are written KEY=VALUE, not '{pair}'")
        if key.strip() in settings:
            raise BadInput(f"rule '{text}': {key.strip()} is given twice")
        settings[key.strip()] = _value(value.strip())
    return find_rule(form[1], settings).name, settings


def rule_from(text: str) -> AcceptanceRule:
    """The rule that a text names. Raises BadInput as :func:`parse_rule` does."""
    return find_rule(*parse_rule(text))


def rule_text(name: str, settings: Mapping[str, Any]) -> str:
    """The text of a rule with these settings."""
    said = ",".join(f"{key}={_text(value)}" for key, value in settings.items())
    return f"{name}({said})" if said else name


def _value(text: str) -> Any:
    """Numbers and words are read by the setting's own type."""
    if text == "null" or text.startswith(("[", "{", '"')):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return text


def _text(value: Any) -> str:
    if isinstance(value, float):
        return number_text(value)
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)

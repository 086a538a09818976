"""Patterns and formats of JSON schemas as their standards read them, where the grammar engine does not.

White space (``\\s``) of ECMA-262 includes U+FEFF and not U+0085; the engine has it the other way round. ``\\d`` and
``\\w`` are ASCII in both.
"""

from __future__ import annotations

import re
from typing import Any

from outpace.constraints.schema_formats import with_strict_format

_SPACE = "[\\s\ufeff--\x85]"
_OTHER = "[^\\s\ufeff--\x85]"
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
INSTANCES = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are instances, not schemas."""
BY_NAME = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by names, which may be those of keywords."""


def ecma_pattern(pattern: str) -> str:
    """A pattern that the engine reads as ECMA-262 reads ``pattern``."""

    def replaced(found: re.Match[str]) -> str:
        return {"s": _SPACE, "S": _OTHER}.get(found[1], found[0])  # in a class they are classes within it

    return _ESCAPED.sub(replaced, pattern)


def by_standards(schema: Any) -> Any:
    """The schema with all its patterns so, and with strict formats."""
    if isinstance(schema, list):
        return [by_standards(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in INSTANCES:
            found[key] = value
        elif key == "pattern" and isinstance(value, str):
            found[key] = ecma_pattern(value)
        elif key == "patternProperties" and isinstance(value, dict):
            found[key] = {ecma_pattern(name): by_standards(one) for name, one in value.items()}
        elif key in BY_NAME and isinstance(value, dict):
            found[key] = {name: by_standards(one) for name, one in value.items()}
        else:
            found[key] = by_standards(value)
    return with_strict_format(found)

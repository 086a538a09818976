"""Patterns of JSON schemas as ECMA-262 reads them, where the grammar engine's regular expressions differ.

White space (``\\s``) of ECMA-262 includes U+FEFF and not U+0085; the engine has it the other way round. ``\\d`` and
``\\w`` are ASCII in both.
"""

from __future__ import annotations

import re
from typing import Any

_SPACE = "[\\s\ufeff--\x85]"
_OTHER = "[^\\s\ufeff--\x85]"
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_INSTANCES = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are instances, not schemas."""
_BY_NAME = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by names, which may be those of keywords."""


def ecma_pattern(pattern: str) -> str:
    """A pattern that the engine reads as ECMA-262 reads ``pattern``."""

    def replaced(found: re.Match[str]) -> str:
        return {"s": _SPACE, "S": _OTHER}.get(found[1], found[0])  # in a class they are classes within it

    return _ESCAPED.sub(replaced, pattern)


def with_ecma_patterns(schema: Any) -> Any:
    """The schema with all its patterns so; a copy where any differs."""
    if isinstance(schema, list):
        return [with_ecma_patterns(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _INSTANCES:
            found[key] = value
        elif key == "pattern" and isinstance(value, str):
            found[key] = ecma_pattern(value)
        elif key == "patternProperties" and isinstance(value, dict):
            found[key] = {ecma_pattern(name): with_ecma_patterns(one) for name, one in value.items()}
        elif key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: with_ecma_patterns(one) for name, one in value.items()}
        else:
            found[key] = with_ecma_patterns(value)
    return found

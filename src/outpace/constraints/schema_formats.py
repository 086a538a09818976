"""Formats of JSON schemas that the grammar engine checks by their shape alone, narrowed to what their standards allow.

The patterns here hold beside the engine's own, which know the shape. A subset is sound: a host name with ``--`` as the
third and fourth character is Punycode, which no pattern can check, and is left out.
"""

from __future__ import annotations

from typing import Any

_LEAP = "..(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00"
"""The years that have a 29 February."""
_DATE = f"(?:....-(?:(?:0[13-9]|1.)-..|02-(?:[01].|2[0-8]))|(?:{_LEAP})-02-29)"
_SECONDS = "..:..:[0-5].*"
"""A leap second is a matter of its day."""
_LABEL = "(?:[^.]{1,3}|[^.]{2}(?:[^-.][^.]|-[^-.])[^.]*)"
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_SECONDS}$",
    "date-time": f"^{_DATE}[Tt]{_SECONDS}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
_LONGEST_HOSTNAME = 253


def with_strict_format(schema: dict[str, Any]) -> dict[str, Any]:
    """One schema, those within it aside, held to what its ``format`` means; a copy where that changes it."""
    form = schema.get("format")
    pattern = _PATTERNS.get(form) if isinstance(form, str) else None
    if pattern is None:
        return schema
    found = dict(schema)
    if form == "hostname":
        given = schema.get("maxLength")
        found["maxLength"] = min(given, _LONGEST_HOSTNAME) if isinstance(given, int) else _LONGEST_HOSTNAME
    if "pattern" not in schema:
        return found | {"pattern": pattern}
    every = schema.get("allOf")
    return found | {"allOf": [*(every if isinstance(every, list) else ()), {"pattern": pattern}]}

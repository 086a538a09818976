"""Structured outputs of an engine: sampled answers under a JSON schema must be objects of that schema."""

from __future__ import annotations

import json
from typing import Any

from outpace.certify.certificate import Check
from outpace.certify.endpoint import Endpoint
from outpace.certify.server_client import Refused
from outpace.core.sampling import SamplingParams

_COLORS = ("red", "green", "blue")
_SCHEMA = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": list(_COLORS)}, "count": {"type": "integer"}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True}}
_PROMPT = "How many balls are there, and of which color? Answer in JSON with the fields color and count.\n"
_ANSWERS, _LENGTH = 8, 64


def check_structured(endpoint: Endpoint, params: SamplingParams, seed: int | None) -> Check:
    """Whether the answers that came to their end are valid; undecided where the server has no structured outputs."""
    name = "structured outputs"
    try:
        texts = endpoint.formatted(_PROMPT, _LENGTH, _ANSWERS, _FORMAT, params, seed)
    except Refused as error:
        return Check(name, None, note=f"not tested: {error.message}")
    wrong = [text for text in texts if not _valid(text)]
    if not texts:
        return Check(name, None, note=f"no answer ended within {_LENGTH} tokens")
    if len(wrong) == len(texts):
        return Check(name, None, note="not tested: no answer is JSON of the schema; the server may ignore it")
    note = f"{len(texts) - len(wrong)} of {len(texts)} answers valid"
    return Check(name, not wrong, note=f"{note}; not: {wrong[0][:60]!r}" if wrong else note)


def _valid(text: str) -> bool:
    try:
        found: Any = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and set(found) == {"color", "count"}
        and found["color"] in _COLORS
        and type(found["count"]) is int
    )

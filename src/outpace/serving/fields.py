"""What all requests' models share: a field is honoured, accepted as it changes nothing, or refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from outpace.core.errors import shortened
from outpace.core.names import LONGEST, did_you_mean
from outpace.serving.errors import ApiError, encodable


@dataclass(frozen=True, slots=True)
class AtMost:
    """An object may have so many entries; more are not looked at one by one, as pydantic's ``max_length`` would."""

    entries: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > self.entries:
            about = {"most": self.entries, "count": len(value)}
            raise PydanticCustomError("too_long", "it may have at most {most} entries, not {count}", about)
        return value


class Fields(BaseModel):
    """A JSON object of a request. Values of another JSON type than the field's are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Fields of OpenAI's API that this server cannot honour, and why."""
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Values of these fields that change nothing, and are accepted; null always is."""

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            if name in cls.model_fields:
                continue
            if value is None and (name in cls.REFUSED or name in cls.NEUTRAL):
                continue
            if any(_same(value, one) for one in cls.NEUTRAL.get(name, ())):
                continue
            shown = shortened(encodable(name), LONGEST)
            raise PydanticCustomError("refused", "{reason}", {"reason": cls._reason(shown), "field": shown})
        return {name: value for name, value in given.items() if name in cls.model_fields}

    @classmethod
    def _reason(cls, name: str) -> str:
        if name in cls.REFUSED:
            return f"'{name}' cannot be honoured: {cls.REFUSED[name]}"
        near = did_you_mean(name, list(cls.model_fields)) or f"known: {', '.join(sorted(cls.model_fields))}"
        return f"there is no field '{name}'; {near}"


def _same(value: Any, other: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return type(value) is type(other) and value == other


def refusal(problems: Seq[Mapping[str, Any]], body: Any) -> ApiError:
    """The problem to report of those that pydantic found in a request's body, its ``errors()``.

    Of the forms that a value may have, it is the one that fits best: where most of it was read, and where it has the
    right JSON type. A field that is refused in words goes first.
    """
    placed = [(_path(one, body), one) for one in problems]
    where, problem = max(placed, key=lambda one: (one[1]["type"] == "refused", len(one[0]), not _typed(one[1])))
    if problem["type"] == "refused":
        return ApiError(problem["msg"], param=".".join([*where, problem["ctx"]["field"]]), code="unsupported_field")
    if problem["type"] == "json_invalid":
        return ApiError(f"the body is not valid JSON: {problem.get('ctx', {}).get('error', problem['msg'])}")
    if problem["type"] == "missing" and not where:
        return ApiError("the request has no body; send a JSON object")
    name = ".".join(where)
    if problem["type"] == "missing":
        return ApiError(f"'{name}' is missing", param=name, code="missing_field")
    said = problem["msg"][:1].lower() + problem["msg"][1:]
    if not name:
        return ApiError(f"the body must be a JSON object: {said}")
    return ApiError(f"'{name}': {said}", param=name, code="invalid_value")


def _typed(problem: Mapping[str, Any]) -> bool:
    """Whether a value has another JSON type than this form of the field."""
    return bool(problem["type"].endswith("_type"))


def field_named(message: str, known: Collection[str]) -> str | None:
    """The field that a message of the engine begins with, as the request calls it."""
    first = message.removeprefix("the ").partition(" ")[0].strip("':,")
    if first == "prompt" and "messages" in known:
        return "messages"
    return first if first in known else None


def _path(problem: Mapping[str, Any], body: Any) -> list[str]:
    """Where a problem is, without the names of the forms that pydantic tried on the way."""
    found: list[str] = []
    parts = [one for one in problem["loc"] if one != "body"]
    for at, part in enumerate(parts):
        missing = problem["type"] == "missing" and at == len(parts) - 1
        if missing or (isinstance(body, dict) and part in body):
            body = body.get(part) if isinstance(body, dict) else None
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        found.append(str(part))
    return found

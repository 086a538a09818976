"""What a request's body says of the form of its answers: from OpenAI's and vLLM's fields to a Grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from outpace.constraints.grammar import Grammar
from outpace.core.errors import BadInput
from outpace.core.names import did_you_mean
from outpace.serving.errors import ApiError

if TYPE_CHECKING:
    from outpace.serving.schemas import Common

_MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}
"""By the names that vLLM has in ``structured_outputs`` and, after ``guided_``, as fields of a request."""


def grammar_of(body: Common) -> tuple[Grammar, str] | None:
    """The grammar of a request's answers, and the field that it came from; None where there is none.

    Raises ApiError for a field that is no grammar, and for several.
    """
    found: list[tuple[Callable[[], Grammar | None], str]] = []
    for name, make in _MAKERS.items():
        given = getattr(body, f"guided_{name}")
        if given is not None:
            found.append((lambda make=make, given=given: make(given), f"guided_{name}"))  # type: ignore[misc]
    if body.response_format is not None and body.response_format.get("type") != "text":
        found.append((lambda: _response_format(body.response_format or {}), "response_format"))
    if body.structured_outputs is not None:
        found.append((lambda: _structured(body.structured_outputs or {}), "structured_outputs"))
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for _, name in found)
        raise ApiError(f"{names} contradict each other; give one of them", param=found[1][1], code="invalid_value")
    [(make_it, field)] = found
    try:
        grammar = make_it()
    except BadInput as error:
        raise ApiError(f"'{field}': {error}", param=field, code="invalid_value") from error
    return None if grammar is None else (grammar, field)


def has_grammar(body: Common) -> bool:
    """Whether a field of the request asks for answers of a certain form."""
    if body.response_format is not None and body.response_format.get("type") != "text":
        return True
    fields = ("structured_outputs", *(f"guided_{name}" for name in _MAKERS))
    return any(getattr(body, name) is not None for name in fields)


def _response_format(given: Mapping[str, Any]) -> Grammar:
    """OpenAI's ``response_format``; a schema holds strictly, whether ``strict`` is asked for or not."""
    kind = given.get("type")
    _only(given, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "json_object":
        return Grammar.schema({"type": "object"})
    if kind != "json_schema":
        raise BadInput("its type must be text, json_object or json_schema")
    named = given.get("json_schema")
    if not isinstance(named, Mapping):
        raise BadInput("json_schema is missing: an object with a name and a schema")
    _only(named, ("name", "schema", "strict", "description"))
    return Grammar.schema({"type": "object"} if named.get("schema") is None else named["schema"])


def _structured(given: Mapping[str, Any]) -> Grammar | None:
    """vLLM's ``structured_outputs``."""
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    _only(chosen, (*_MAKERS, "json_object"))
    if len(chosen) > 1:
        raise BadInput(f"{' and '.join(chosen)} contradict each other; give one of them")
    for name, value in chosen.items():
        return Grammar.schema({"type": "object"}) if name == "json_object" else _MAKERS[name](value)
    return None


def _only(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            near = did_you_mean(str(name), list(known)) or f"known: {', '.join(known)}"
            raise BadInput(f"there is no field '{name}'; {near}")

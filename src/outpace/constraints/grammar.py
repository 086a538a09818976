"""Grammar: what a user writes to constrain an answer, before it is compiled for a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outpace.core.errors import BadInput, shortened, shown
from outpace.core.text import check_text

Kind = Literal["schema", "regex", "lark", "choice"]
_NAMES = {"schema": "schema", "regex": "regular expression", "lark": "grammar", "choice": "list of choices"}
_MOST_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds on what is compiled. ``max_bytes``: of the source. ``seconds``: about how long compiling may take.

    Raises BadInput for values out of range.
    """

    max_bytes: int = 1_000_000
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_bytes <= _MOST_BYTES:
            raise BadInput(f"the limit on a grammar's size must be 1 to {_MOST_BYTES:,} bytes, not {self.max_bytes:,}")
        if not 0.0 < self.seconds <= 3600.0:
            raise BadInput(f"the limit on a grammar's compile time must be in (0, 3600] seconds, not {self.seconds:g}")


DEFAULT_LIMITS = GrammarLimits()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like: a JSON schema, a regular expression, a Lark or EBNF grammar, or choices.

    Make one with :meth:`schema`, :meth:`regex`, :meth:`lark` or :meth:`choice`. ``source`` is what was given: JSON in a
    text for schemas and choices.

    >>> Grammar.choice(["yes", "no"]).source
    '["yes", "no"]'
    """

    kind: Kind
    source: str

    @classmethod
    def schema(cls, schema: Any) -> Grammar:
        """JSON that a schema describes: a dict, JSON text, True for any JSON, or a pydantic model's class.

        The layout is fixed: ``{"a": 1, "b": [1, 2]}``, keys in the schema's order. ``"x-guidance":
        {"whitespace_flexible": true}`` at the schema's top allows any white space. Texts have no ``\\uXXXX``. Raises
        BadInput for what is no schema.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            check_text(schema, "the schema")
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"the schema is not valid JSON: {shortened(str(error))}") from None
        if not isinstance(schema, Mapping | bool):
            raise BadInput(f"a schema must be a JSON object, or true for any JSON, not {shown(schema)}")
        try:
            source = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"the schema is not JSON: {shortened(str(error))}") from None
        check_text(source, "the schema")  # again: JSON's escapes can spell half of a surrogate pair
        return cls("schema", source)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole. Raises BadInput for what is no text."""
        return cls("regex", _text(pattern, "the regular expression"))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that a grammar produces: in Lark's syntax from ``start``, or in GBNF from ``root ::=``.

        Raises BadInput for what is no text, and for JSON.
        """
        if _text(text, "the grammar").lstrip().startswith("{"):  # no grammar begins so
            raise BadInput(
                "the grammar is JSON text; give a JSON schema as --schema, a dict or outpace.Grammar.schema(text)"
            )
        return cls("lark", text)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of several texts. Raises BadInput where there is none, or one is empty or given twice."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise BadInput(f"choices must be a list of texts, not {shown(choices)}")
        for one in choices:
            _text(one, "a choice")
        if len(set(choices)) < len(choices):
            raise BadInput("two choices are the same; give each once")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def read(cls, given: Any) -> Grammar:
        """A grammar from any form that ``grammar=`` takes: a Grammar; a dict or a pydantic model's class (a schema); a
        list of texts (choices); a text (Lark or GBNF). Raises BadInput for others."""
        if isinstance(given, Grammar):
            return given
        if isinstance(given, str):
            return cls.lark(given)
        if isinstance(given, list | tuple):
            return cls.choice(given)
        if isinstance(given, Mapping) or hasattr(given, "model_json_schema"):
            return cls.schema(given)
        raise BadInput(
            "grammar must be an outpace.Grammar, a JSON schema (a dict), a list of choices or a Lark grammar (a text), "
            f"not {shown(given)}"
        )

    @property
    def name(self) -> str:
        """What it is, in words."""
        return _NAMES[self.kind]


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise BadInput(f"{what} must be a text, not {shown(given)}")
    check_text(given, what)
    if not given:
        raise BadInput(f"{what} is empty")
    return given

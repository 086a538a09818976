r"""What the grammar engine would not hold answers to, refused in words before it is compiled.

Answers have no ``\uXXXX``, and so no control characters but ``\b``, ``\f``, ``\n``, ``\r`` and ``\t``. Out of a
constant text or a pattern that demands another one the engine drops it, and would allow what the schema does not.
Keys that a schema does not name can be written twice, so that none can be counted on beyond the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from outpace.constraints.schema_patterns import BY_NAME, INSTANCES
from outpace.core.errors import BadInput, shortened

_GUIDANCE = "x-guidance"
_BLANK = r"(?:[ \t\r\n]|\\[trn])"
_BLANKS = rf"(?:(?:{_BLANK}|\[{_BLANK}+\])(?:[?*+]|\{{\d{{1,4}}(?:,\d{{0,4}})?\}})?)*"
"""A regular expression of white space, as JSON has it."""
_SEPARATORS = {
    "item_separator": re.compile(f"{_BLANKS},{_BLANKS}"),
    "key_separator": re.compile(f"{_BLANKS}:{_BLANKS}"),
    "whitespace_pattern": re.compile(_BLANKS),
}
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_ESCAPED = re.compile(
    r"\\(?:x\{0*([0-9A-Fa-f]{1,2})\}|u\{0*([0-9A-Fa-f]{1,2})\}|x([0-9A-Fa-f]{2})|u00([0-9A-Fa-f]{2})"
    r"|U000000([0-9A-Fa-f]{2})|([0av])|(.))",
    re.DOTALL,
)
_LETTERS = {"0": "\x00", "a": "\x07", "v": "\x0b"}


def check_expressible(schema: Any) -> None:
    """Raise BadInput for a schema of which answers could break a part: see above, and options of the engine other than
    white space and separators, which would have it ignore keywords or change their meaning."""
    if isinstance(schema, dict) and _GUIDANCE in schema:
        _check_guidance(schema[_GUIDANCE])
        schema = {key: value for key, value in schema.items() if key != _GUIDANCE}
    _check(schema, frozenset())


def _check_guidance(options: Any) -> None:
    if not isinstance(options, dict):
        raise BadInput(f'the schema\'s "{_GUIDANCE}" must be an object, such as {{"whitespace_flexible": true}}')
    for name, value in options.items():
        if name == "whitespace_flexible":
            if not isinstance(value, bool):
                raise BadInput(f"the schema's \"{_GUIDANCE}\": '{name}' must be true or false")
        elif name not in _SEPARATORS:
            raise BadInput(
                f"the schema's \"{_GUIDANCE}\" has '{shortened(str(name), 60)}', which is not taken; it may have "
                f"whitespace_flexible, {', '.join(_SEPARATORS)}"
            )
        elif not isinstance(value, str) or not _SEPARATORS[name].fullmatch(value):
            sign = {"item_separator": " around one comma", "key_separator": " around one colon"}.get(name, "")
            raise BadInput(f"the schema's \"{_GUIDANCE}\": '{name}' must be a pattern of white space{sign}")


def _check(schema: Any, demanded: frozenset[str]) -> None:
    """``demanded``: keys that other schemas require of the same value."""
    if isinstance(schema, list):
        for one in schema:
            _check(one, frozenset())
    if not isinstance(schema, dict):
        return
    if _GUIDANCE in schema:
        raise BadInput(
            f'the schema has "{_GUIDANCE}" inside of it; it holds for the whole schema, so put it at the top'
        )
    every = schema.get("allOf")
    for one in (schema, *(every if isinstance(every, list) else ())):
        demanded |= _required(one)
    _check_count(schema, demanded)
    for keyword, value in schema.items():
        if keyword in ("const", "enum"):
            _check_constant(keyword, value)
        elif keyword == "pattern":
            _check_pattern(value)
        elif keyword not in INSTANCES:
            _check_inner(keyword, value, demanded)


def _check_inner(keyword: str, value: Any, demanded: frozenset[str]) -> None:
    """The schemas of one keyword."""
    if keyword in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
        for one in value:
            _check(one, demanded)
    elif isinstance(value, dict) and (keyword in BY_NAME or keyword == "patternProperties"):
        for name, one in value.items():
            if keyword == "patternProperties":
                _check_pattern(name)
            _check(one, frozenset())
    else:
        _check(value, frozenset())


def _required(schema: Any) -> frozenset[str]:
    names = schema.get("required") if isinstance(schema, dict) else None
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _check_count(schema: dict[str, Any], demanded: frozenset[str]) -> None:
    least, kinds = schema.get("minProperties"), schema.get("type", "object")
    if isinstance(least, bool) or not isinstance(least, int | float) or "const" in schema or "enum" in schema:
        return
    if least > len(demanded) + 1 and (kinds == "object" or (isinstance(kinds, list) and "object" in kinds)):
        raise BadInput(
            f"the schema cannot be used: minProperties is {least}, of which 'required' names {len(demanded)}; of keys "
            f"without a name one at most can be demanded, because they may be written twice: name {least - 1} or more "
            "in 'required', or lower minProperties"
        )


def _check_constant(keyword: str, value: Any) -> None:
    for text in _texts(value):
        if found := _UNWRITABLE.search(text):
            raise BadInput(_unwritable(f"a text in '{keyword}'", found[0]))


def _texts(value: Any) -> Iterator[str]:
    """All texts of a value but keys, which are allowed as they are written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value if isinstance(value, list) else value.values():
            yield from _texts(one)


def _check_pattern(pattern: Any) -> None:
    """One control character, or a class of it alone, cannot be matched; where others may stand in its place the engine
    leaves it out, as it should."""
    if not isinstance(pattern, str):
        return
    at = opened = began = 0
    members = set[str]()
    while at < len(pattern):
        escape = _ESCAPED.match(pattern, at)
        sign = escape[0] if escape else pattern[at]
        value = _value(escape) if escape else sign
        found = value if not opened and _UNWRITABLE.fullmatch(value) else None
        if sign == "[":
            began, members = (began, members) if opened else (at, set())
            opened += 1
        elif sign == "]" and opened:
            opened -= 1
            found = None if opened else _alone(members, pattern[began:at])
        elif opened:
            members.add(value)
        if found:
            raise BadInput(_unwritable(f"the pattern {shortened(pattern, 60)!r}", found))
        at += len(sign)


def _alone(members: set[str], text: str) -> str | None:
    """The control character that a class may have alone: it has no other member, or an operation may take them."""
    found = next((one for one in sorted(members) if _UNWRITABLE.fullmatch(one)), None)
    alone = len(members - {"-"}) == 1 or any(one in text for one in ("&&", "--", "~~"))
    return found if alone else None


def _value(escape: re.Match[str]) -> str:
    """The character that an escape stands for; the escape itself for a class, an anchor or a quoted sign."""
    *codes, letter, _ = escape.groups()
    code = next((one for one in codes if one is not None), None)
    return chr(int(code, 16)) if code is not None else _LETTERS.get(letter, escape[0])


def _unwritable(where: str, character: str) -> str:
    return (
        f"the schema cannot be used: {where} demands the control character U+{ord(character):04X}, and of these "
        r"answers have \b, \f, \n, \r and \t alone; take it out"
    )

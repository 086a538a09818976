"""CallScanner: one call of a tool, read character by character while the model writes it.

Names are checked against those that were offered. Arguments are passed on as they are written, and not judged: as with
OpenAI's API, a model may write arguments that are not valid JSON, or that do not fit the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator

_SPACE = " \t\r\n"
_WORD = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_ARGUMENTS = ("arguments", "parameters")
_LONGEST_NAME = 256

Reading = Generator[None, str, str]
"""Takes characters; returns what it has read, or the character after it."""


class _NoCall(Exception):
    """The last character cannot stand there."""


class CallScanner:
    """Reads ``{"name": ..., "arguments": {...}}``, or with ``bare`` a name, then the object of arguments.

    ``begun``: it is a call of ``name``, and :meth:`take_arguments` gives its arguments piece by piece. ``refused``: it
    is none. ``ended``: it is over. ``needs_arguments``: an object without them is no call.
    """

    def __init__(self, names: Collection[str], *, bare: bool = False, needs_arguments: bool = False) -> None:
        self._names, self._needs_arguments = names, needs_arguments
        self.name: str | None = None
        self.begun = self.ended = self.refused = False
        self._arguments: list[str] = []
        self._waiting: str | None = None
        """Arguments that were written before the name."""
        self._reading = self._bare() if bare else self._object()
        next(self._reading)

    def push(self, text: str) -> int:
        """Read on. Returns how many characters belong to the call: all, until it has ended or is refused."""
        for at, char in enumerate(text):
            try:
                self._reading.send(char)
            except StopIteration:
                self.ended = True
                return at + 1
            except _NoCall:
                self.ended, self.refused = self.begun, not self.begun
                return at
        return len(text)

    def take_arguments(self) -> str:
        """The arguments' text since the last call of this method."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _object(self) -> Reading:
        if (yield from _next()) != "{":
            raise _NoCall
        char = yield from _next()
        while char != "}":
            if char != '"':
                raise _NoCall
            key = _meaning((yield from _string()))
            if (yield from _next()) != ":":
                raise _NoCall
            char = yield from self._member(key)
            if char == ",":
                char = yield from _next()
            elif char != "}":
                raise _NoCall
        if not self.begun:
            if self.name is None or self._needs_arguments:
                raise _NoCall
            self._begin("{}")
        return char

    def _member(self, key: str | None) -> Reading:
        """A member's value. Returns the character that follows."""
        first, after = (yield from _next()), ""
        arguments = key in _ARGUMENTS and not self.begun and self._waiting is None
        if first in "{[":
            streamed = arguments and self.name is not None
            if streamed:
                self._begin("")
            text = yield from _nested(first, self._arguments if streamed else [])
        elif first == '"':
            text = yield from _string()
        else:
            text, after = yield from _word(first)
        if key == "name" and self.name is None:
            self._named(_meaning(text) if first == '"' else None)
            if self._waiting is not None:
                self._begin(self._waiting)
        elif arguments and not self.begun:
            meant = _meaning(text) if first == '"' else "{}" if text == "null" else text
            if meant is None:
                raise _NoCall
            if self.name is None:
                self._waiting = meant
            else:
                self._begin(meant)
        return after if after and after not in _SPACE else (yield from _next())

    def _bare(self) -> Reading:
        """``name{...}``, or with markers in square brackets between the two."""
        char, name = (yield), ""
        while char not in "{[":
            name += char
            if len(name) > _LONGEST_NAME:
                raise _NoCall
            char = yield
        self._named(name.strip())
        while char != "{":
            char = yield
        self._begin("")
        return (yield from _nested(char, self._arguments))

    def _named(self, name: str | None) -> None:
        if name is None or name not in self._names:
            raise _NoCall
        self.name = name

    def _begin(self, arguments: str) -> None:
        self.begun = True
        if arguments:
            self._arguments.append(arguments)


def _next() -> Reading:
    """The next character that is no white space."""
    while (char := (yield)) in _SPACE:
        pass
    return char


def _string() -> Reading:
    """A string after its opening quotation mark; with both marks, as it is written."""
    text, escaped = ['"'], False
    while True:
        text.append(char := (yield))
        if char == '"' and not escaped:
            return "".join(text)
        escaped = char == "\\" and not escaped


def _nested(first: str, text: list[str]) -> Reading:
    """An object or array, added to ``text`` as it comes. Brackets are counted, not matched."""
    text.append(first)
    whole, depth, in_string, escaped = [first], 1, False, False
    while depth:
        char = yield
        text.append(char)
        whole.append(char)
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        else:
            depth += (char in "{[") - (char in "}]")
    return "".join(whole)


def _word(first: str) -> Generator[None, str, tuple[str, str]]:
    """A number, true, false or null, and the character after it."""
    if first not in _WORD:
        raise _NoCall
    text, char = first, (yield)
    while char in _WORD:
        text += char
        char = yield
    return text, char


def _meaning(string: str) -> str | None:
    """What a string's notation stands for; None where it is invalid."""
    try:
        found = json.loads(string, strict=False)
    except ValueError:
        return None
    return found.encode("utf-8", "replace").decode() if isinstance(found, str) else None

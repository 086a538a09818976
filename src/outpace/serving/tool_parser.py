"""ToolParser: divides an answer into content and calls of tools while it is written.

Nothing is released that later text could show to be the beginning of a call. A call is one as soon as it names an
offered function and its arguments begin; then its arguments are released as they are written. What turns out to be no
call is content. Every division of an answer into pieces gives the same content and the same calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace.models.base import ChatTokenizer
from outpace.serving.call_scanner import CallScanner
from outpace.serving.errors import ApiError
from outpace.serving.tools import Call, Format

BLANK = " \t\r\n"
"""White space that may stand around the beginning of a call: what ``tool_grammar`` takes for it, no other."""
_BETWEEN = f"{BLANK},;"
"""What may stand between two calls."""


@dataclass(slots=True)
class Released:
    """What a piece of an answer released: content, and parts of calls as chunks of a stream show them."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class ToolParser:
    """Reads one answer. ``names``: the functions offered; ``parallel``: whether what follows the first call counts.

    ``forced``: the beginning of the answer, which the server wrote so that the answer is a call. If the model does not
    go on with one, ApiError is raised. ``content`` and ``calls``: what has been released.
    """

    format: Format
    names: Collection[str]
    tokenizer: ChatTokenizer
    parallel: bool = True
    forced: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    _rest: str = ""
    """Text that is not divided yet."""
    _space: str = ""
    """White space after the content: it belongs to it unless a call follows."""
    _attempt: str = ""
    """What has been read of a call that has not begun."""
    _closer: str = ""
    _scanner: CallScanner | None = None
    _where: str = "start"
    _released: Released = field(default_factory=Released)
    _tokens: list[int] = field(default_factory=list)
    _length: int = 0
    _special: list[tuple[int, str]] = field(default_factory=list)
    """Markers that are special tokens, and so not in the text: where they belong."""

    def __post_init__(self) -> None:
        self._rest = self.forced

    def copy(self) -> ToolParser:
        """A parser for another answer to the same request."""
        return ToolParser(self.format, self.names, self.tokenizer, self.parallel, self.forced)

    @property
    def complete(self) -> bool:
        """Whether there are calls, and the last was written to its end."""
        return bool(self.calls) and self.calls[-1].complete

    def push(self, text: str, tokens: Seq[int] = ()) -> Released:
        """More of the answer: text, and the tokens up to there or beyond."""
        self._mark(tokens)
        for part in self._with_markers(text, final=False):
            self._rest += part
        return self._read(final=False)

    def finish(self, reason: str | None = None) -> Released:
        """The end of the answer, for ``reason``. Raises ApiError for a forced call that there is not."""
        for part in self._with_markers("", final=True):
            self._rest += part
        released = self._read(final=True)
        if self.forced and not self.calls and reason != "length":
            raise self._missing()
        return released

    def _mark(self, tokens: Seq[int]) -> None:
        marks = (*self.format.markers, *self.format.inside)
        for token in tokens:
            if (
                self.tokenizer.token_bytes(token) is None
                and (mark := self.tokenizer.token_text(token).strip()) in marks
            ):
                self._special.append((len(self.tokenizer.decode(self._tokens)), mark))
            self._tokens.append(token)

    def _with_markers(self, text: str, final: bool) -> Iterator[str]:
        """The text, with those special tokens in it whose places it reaches."""
        while self._special and (final or self._special[0][0] <= self._length + len(text)):
            at, mark = self._special.pop(0)
            cut = max(0, at - self._length)
            yield text[:cut] + mark
            self._length += len(text[:cut])
            text = text[cut:]
        self._length += len(text)
        yield text

    def _read(self, final: bool) -> Released:
        steps = {"start": self._start, "text": self._text, "open": self._open, "call": self._call, "after": self._after}
        while self._where != "end" and steps[self._where](final):
            pass
        if final and not self.calls:
            self._released.content += self._space
            self.content += self._space
            self._space = ""
        released, self._released = self._released, Released()
        return released

    # Each step reads what it can, and returns whether the next step has something to do.

    def _start(self, final: bool) -> bool:
        """Before anything else: a call without a marker, for formats that have such."""
        found = self._opening(self._rest.lstrip(BLANK))
        if found is None and not final:
            return False
        self._where = "text"
        if found:
            opener, body = found
            self._closer = self.format.openings[opener]
            self._attempt, self._rest = self._rest[: len(self._rest) - len(body)], body
            self._scan(bare=False, needs_arguments=True)
        return True

    def _opening(self, text: str) -> tuple[str, str] | tuple[()] | None:
        """How a call begins that has no marker, and its object; () where none does; None where more must be known."""
        if not self.format.openings:
            return ()
        for opener in self.format.openings:
            body = text.removeprefix(opener).lstrip(BLANK)
            if opener.startswith(text) or (text.startswith(opener) and not body):
                return None
            if text.startswith(opener) and body.startswith("{"):
                return opener, body
        return ()

    def _text(self, final: bool) -> bool:
        found = [(at, mark) for mark in self.format.markers if (at := self._rest.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._say(self._rest[:at])
            self._attempt, self._rest = mark, self._rest[at + len(mark) :]
            self._closer, self._where = self.format.markers[mark], "open"
            return True
        held = 0 if final else max(_begun(self._rest, mark) for mark in self.format.markers)
        self._say(self._rest[: len(self._rest) - held])
        self._rest = self._rest[len(self._rest) - held :]
        return False

    def _open(self, final: bool) -> bool:
        """After a marker."""
        body = self._rest.lstrip(BLANK)
        if not body:
            if final:
                self._refuse()
            return final
        if self.format.listed and body.startswith("["):
            body = body[1:]
        bare = self.format.listed and len(body) == len(self._rest.lstrip(BLANK)) and not body.startswith("{")
        self._attempt += self._rest[: len(self._rest) - len(body)]
        self._rest = body
        if bare:
            self._closer = ""
        self._scan(bare=bare)
        return True

    def _scan(self, bare: bool, needs_arguments: bool = False) -> None:
        self._scanner = CallScanner(self.names, bare=bare, needs_arguments=needs_arguments)
        self._where = "call"

    def _call(self, final: bool) -> bool:
        scanner = self._scanner
        assert scanner is not None
        known = scanner.begun
        read = scanner.push(self._rest)
        self._attempt += self._rest[:read]
        self._rest = self._rest[read:]
        if scanner.begun:
            self._attempt = ""
            if not known:
                assert scanner.name is not None
                self._begin(scanner.name)
            self._argue(scanner.take_arguments())
        if scanner.ended:
            self.calls[-1].complete = True
            self._where = "after" if self.parallel else "end"
            return True
        if scanner.refused or (final and not scanner.begun):
            self._refuse()
            return True
        return False

    def _refuse(self) -> None:
        """What was read is no call."""
        self._where = "text"
        if self.forced and not self.calls:
            if not (self._scanner and self._scanner.refused):  # the answer was cut short
                self._attempt = ""
                return
            raise self._missing()
        self._say(self._attempt)
        self._attempt = ""

    def _after(self, final: bool) -> bool:
        """After a call: the next one in the same list, or its end."""
        body = self._rest.lstrip(_BETWEEN)
        if self._closer and body.startswith(self._closer):
            self._rest, self._where = body[len(self._closer) :], "text"
            return True
        if not body or (self._closer and self._closer.startswith(body)):
            if final:
                self._rest = ""
            return False
        if body.startswith("{"):
            self._attempt = self._rest[: len(self._rest) - len(body)]
            self._rest = body
            self._scan(bare=False, needs_arguments=not self._closer)
            return True
        self._where = "text"
        return True

    def _say(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._released.content += shown
        self.content += shown

    def _begin(self, name: str) -> None:
        self._space = ""
        call = Call(name, self.format.call_id())
        self._released.calls.append({"index": len(self.calls), **call.shown()})
        self.calls.append(call)

    def _argue(self, text: str) -> None:
        if text:
            self.calls[-1].arguments += text
            self._released.calls.append({"index": len(self.calls) - 1, "function": {"arguments": text}})

    def _missing(self) -> ApiError:
        return ApiError(
            "the model did not write a call of an offered function, which 'tool_choice' asks for; try again, or name "
            "one function",
            500,
            param="tool_choice",
            code="tool_call_failed",
        )


def _begun(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` begin ``marker``."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)

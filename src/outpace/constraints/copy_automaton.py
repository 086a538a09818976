"""The states of programs that copy lines: where an answer stands, what may follow, and what each token is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from outpace.constraints.copy_program import CopyProgram
    from outpace.core.constraint import Bits

Role: TypeAlias = Literal["directive", "copied", "new"]
"""What a token of an answer is: part of a directive, of copied lines, or of new ones."""
State: TypeAlias = "ProgramPlace"
Then: TypeAlias = Callable[[], "ProgramPlace"]
_NEWLINE = b"\n"


@dataclass(slots=True)
class Number:
    """A beginning of line numbers' spellings: the tokens that go on, the number that ends here (0: none), the largest
    number that begins so."""

    more: dict[int, Number] = field(default_factory=dict)
    value: int = 0
    largest: int = 0


class ProgramPlace:
    """A state of the automaton."""

    __slots__ = ("program",)
    complete = False

    def __init__(self, program: CopyProgram) -> None:
        self.program = program

    def follows(self) -> tuple[int, ...] | None:
        """The tokens that may follow; None: any text."""
        raise NotImplementedError

    def advance(self, token: int) -> State | None:
        raise NotImplementedError

    def role(self, token: int) -> Role:
        """What ``token``, which follows, is."""
        return "directive"

    def allowed(self, size: int) -> Bits:
        found = self.follows()
        return self.program.any_text(size) if found is None else self.program.mask(found, size)

    def forced(self) -> Sequence[int]:
        found: list[int] = []
        at: State | None = self
        while at is not None and not at.complete:
            if isinstance(at, _Words):
                found += at.tokens[at.at :]
                at = at.then()
                continue
            only = at.follows()
            if only is None or len(only) != 1:
                break
            found += only
            at = at.advance(only[0])
        return found


class _Words(ProgramPlace):
    """``tokens`` follow from index ``at`` on, one after the other, and then another state."""

    __slots__ = ("at", "kind", "then", "tokens")

    def __init__(
        self, program: CopyProgram, tokens: Sequence[int], at: int, then: Then, kind: Role = "directive"
    ) -> None:
        super().__init__(program)
        self.tokens, self.at, self.then, self.kind = tokens, at, then, kind

    def follows(self) -> tuple[int, ...]:
        return (self.tokens[self.at],)

    def advance(self, token: int) -> State | None:
        if token != self.tokens[self.at]:
            return None
        return _after(self.program, self.tokens, self.at + 1, self.then, self.kind)

    def role(self, token: int) -> Role:
        return self.kind


def _after(program: CopyProgram, tokens: Sequence[int], at: int, then: Then, kind: Role = "directive") -> State:
    return _Words(program, tokens, at, then, kind) if at < len(tokens) else then()


class Boundary(ProgramPlace):
    """Between two directives: at the beginning, and behind a copied span. ``whole``: the answer may end here.

    ``copied``: the last line that was copied, behind which the next span begins where the program keeps the order; 0:
    none.
    """

    __slots__ = ("complete", "copied")

    def __init__(self, program: CopyProgram, *, whole: bool, copied: int = 0) -> None:
        super().__init__(program)
        self.complete, self.copied = whole, copied

    def follows(self) -> tuple[int, ...] | None:
        return tuple(sorted({way[0] for way in self.program.directives(self.copied)}))

    def advance(self, token: int) -> State | None:
        return _directive(self.program, self.program.directives(self.copied), token, self.copied)


class _NewLines(ProgramPlace):
    """In generated text. ``start``: at the beginning of a line, where the answer may end and lines may be copied, but
    for the first: a step without lines, or two in a row, would say nothing."""

    __slots__ = ("complete", "copied", "start")

    def __init__(self, program: CopyProgram, *, start: bool, copied: int, first: bool = False) -> None:
        super().__init__(program)
        self.start, self.copied = start, copied
        self.complete = start and not first

    def follows(self) -> tuple[int, ...] | None:
        return None

    def allowed(self, size: int) -> Bits:
        if not self.start:
            return self.program.any_text(size)
        return self.program.line_beginnings(size, frozenset(way[0] for way in self._ways))

    @property
    def _ways(self) -> tuple[tuple[int, ...], ...]:
        """The directives that may follow."""
        return self.program.directives(self.copied, generating=True) if self.complete else ()

    def advance(self, token: int) -> State | None:
        if self.start and token in self.program.begins_directive:
            return _directive(self.program, self._ways, token, self.copied)
        known = 0 <= token < len(self.program.tokenizer)
        added = self.program.tokenizer.token_bytes(token) if known else None
        return _NewLines(self.program, start=added.endswith(_NEWLINE), copied=self.copied) if added else None

    def role(self, token: int) -> Role:
        return "directive" if self.start and token in self.program.begins_directive else "new"


class _Choice(ProgramPlace):
    """In a directive, where several ``ways`` begin with the same ``at`` tokens."""

    __slots__ = ("at", "copied", "ways")

    def __init__(self, program: CopyProgram, ways: tuple[tuple[int, ...], ...], at: int, copied: int) -> None:
        super().__init__(program)
        self.ways, self.at, self.copied = ways, at, copied

    def follows(self) -> tuple[int, ...]:
        return tuple(sorted({way[self.at] for way in self.ways}))

    def advance(self, token: int) -> State | None:
        return _directive(self.program, self.ways, token, self.copied, self.at)


class _LineNumber(ProgramPlace):
    """In a number of a copy, which is ``least`` or larger: ``number`` is its beginning, ``first`` the span's first line
    once that is known."""

    __slots__ = ("first", "least", "number")

    def __init__(self, program: CopyProgram, number: Number, least: int, first: int = 0) -> None:
        super().__init__(program)
        self.number, self.least, self.first = number, least, first

    def follows(self) -> tuple[int, ...]:
        found = [token for token, one in self.number.more.items() if one.largest >= self.least]
        if self._may_end:
            found.append(self._end[0])
        return tuple(sorted(found))

    @property
    def _may_end(self) -> bool:
        return self.number.value >= self.least

    @property
    def _end(self) -> tuple[int, ...]:
        return self.program.close if self.first else self.program.to

    def advance(self, token: int) -> State | None:
        longer = self.number.more.get(token)
        if longer is not None and longer.largest >= self.least:
            return _LineNumber(self.program, longer, self.least, self.first)
        if not self._may_end or token != self._end[0]:
            return None
        program, first, number = self.program, self.first, self.number.value

        def then() -> State:
            if first:
                span = program.span(first, number)
                return _after(program, span, 0, lambda: Boundary(program, whole=True, copied=number), "copied")
            return _LineNumber(program, program.numbers, number, number)

        return _after(program, self._end, 1, then)


def _directive(
    program: CopyProgram, ways: tuple[tuple[int, ...], ...], token: int, copied: int, at: int = 0
) -> State | None:
    """The state after the token of index ``at`` of one of the directives ``ways``."""
    left = tuple(way for way in ways if way[at] == token)
    if len(left) > 1:
        return _Choice(program, left, at + 1, copied)
    if left == (program.copy,):
        least = 1 + program.behind(copied)
        return _after(program, program.copy, at + 1, lambda: _LineNumber(program, program.numbers, least))
    if left == (program.generate,):
        return _after(
            program, program.generate, at + 1, lambda: _NewLines(program, start=True, copied=copied, first=True)
        )
    return None

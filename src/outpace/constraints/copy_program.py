"""CopyProgram: answers that are programs of ``copy(i-j)`` and ``generate``, enforced token by token.

The grammar of Copy-as-Decode. An edited text is written as::

    @@ copy(1-4)
    (lines 1 to 4 of the text that is edited)
    @@ generate
    (new lines)
    @@ copy(7-20)
    ...

Directives are spelled in one way. What follows a ``copy`` is decided by the program: each token of the span is the only
one allowed, so that whoever drafts it has it accepted, whatever the target's probabilities. New lines hold any text;
at the beginning of a line the token that directives begin with begins one. Directives are not part of the text that
is shown: what is shown is the edited text, of which every line ends with a newline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from outpace.core.constraint import Bits, ConstraintState, bits_of
from outpace.core.errors import BadInput
from outpace.core.lru import Lru
from outpace.models.base import ChatTokenizer

MOST_LINES = 9999
"""Lines of a text that can be copied from: each number is spelled once when the automaton is made."""
COPY, TO, CLOSE, GENERATE = "@@ copy(", "-", ")\n", "@@ generate\n"
_NEWLINE = b"\n"
_JOINED = "if x:\n", "    y = 2\n"

_TEXTS: Lru[tuple[str, int], Bits] = Lru(4)
"""The tokens that add to a text, by the tokenizer's fingerprint and the vocabulary's size."""

State: TypeAlias = "_Place"
Then: TypeAlias = Callable[[], "_Place"]


def lines_of(text: str) -> list[str]:
    """The lines of a text, each with its newline; the last gets one where it has none."""
    lines = text.split("\n")
    return [f"{line}\n" for line in (lines[:-1] if lines[-1] == "" else lines)]


@dataclass(slots=True)
class _Number:
    """A beginning of line numbers' spellings: the tokens that go on, the number that ends here (0: none), the largest
    number that begins so."""

    more: dict[int, _Number] = field(default_factory=dict)
    value: int = 0
    largest: int = 0


class CopyProgram:
    """Programs over the lines of ``text``: a :class:`~outpace.core.constraint.Constraint`.

    Raises BadInput for a text without lines or of more than :data:`MOST_LINES`, and for a tokenizer that does not
    write texts back as they were.
    """

    def __init__(self, text: str, tokenizer: ChatTokenizer) -> None:
        self.lines = lines_of(text)
        if not self.lines:
            raise BadInput("there are no lines to copy from: the text to edit is empty")
        if len(self.lines) > MOST_LINES:
            raise BadInput(
                f"the text to edit has {len(self.lines):,} lines, and the limit is {MOST_LINES:,}; give a part"
            )
        self.tokenizer = tokenizer
        self._check_tokenizer()
        self.copy, self.to, self.close, self.generate = map(self.spelled, (COPY, TO, CLOSE, GENERATE))
        self.begins_directive = frozenset({self.copy[0], self.generate[0]})
        self._masks: dict[tuple[int, ...], Bits] = {}
        self._spans: dict[tuple[int, int], tuple[int, ...]] = {}

    def __repr__(self) -> str:
        return f"CopyProgram({len(self.lines)} lines)"

    def begin(self) -> ConstraintState:
        return _Boundary(self, whole=False)

    def accepts(self, text: str) -> bool:
        """Whether a program can have ``text`` as its edited text."""
        return not text or text.endswith("\n")

    def shown(self) -> Callable[[int], bool]:
        """Told each token of an answer in turn: whether it is part of the edited text."""
        at: State | None = _Boundary(self, whole=False)

        def tell(token: int) -> bool:
            nonlocal at
            before, at = at, None if at is None else at.advance(token)
            return before is not None and before.holds_text(token)

        return tell

    def spelled(self, text: str) -> tuple[int, ...]:
        """The usual tokens of a text. Raises BadInput where they do not spell it."""
        batch: Any = getattr(self.tokenizer, "encode_batch", None)
        tokens = self.tokenizer.encode(text) if batch is None else batch([text])[0]
        if b"".join(self.tokenizer.token_bytes(token) or b"" for token in tokens) != text.encode():
            raise BadInput(
                f"copying needs a tokenizer that writes texts back as they were; this one changes {text[:40]!r}"
            )
        return tuple(tokens)

    def span(self, first: int, last: int) -> tuple[int, ...]:
        """The tokens of lines ``first`` to ``last``, counted from 1."""
        key = (first, last)
        if key not in self._spans:
            self._spans[key] = self.spelled("".join(self.lines[first - 1 : last]))
        return self._spans[key]

    def text_of(self, token: int) -> str:
        """What a token adds to a text; half a character as a replacement."""
        return (self.tokenizer.token_bytes(token) or b"").decode(errors="replace")

    def numbered(self) -> str:
        """The lines with their numbers, as a model reads them to choose."""
        return "".join(f"{number}|{line}" for number, line in enumerate(self.lines, 1))

    @cached_property
    def numbers(self) -> _Number:
        """The spellings of all line numbers."""
        root = _Number(largest=len(self.lines))
        for number in range(1, len(self.lines) + 1):
            at = root
            for token in self.spelled(str(number)):
                at = at.more.setdefault(token, _Number())
                at.largest = max(at.largest, number)
            at.value = number
        return root

    def mask(self, tokens: Sequence[int], size: int) -> Bits:
        """The set of a few tokens; that of one is often asked again."""
        key = (size, *tokens)
        if key not in self._masks:
            self._masks[key] = bits_of(tokens, size)
        return self._masks[key]

    def any_text(self, size: int) -> Bits:
        """The set of all tokens that add to a text."""
        key = (self.tokenizer.fingerprint, size)
        found = _TEXTS.get(key)
        if found is None:
            known = range(min(size, len(self.tokenizer)))
            found = bits_of([token for token in known if self.tokenizer.token_bytes(token)], size)
            _TEXTS.put(key, found)
        return found

    def _check_tokenizer(self) -> None:
        """Texts of several spans are joined: raise BadInput for a tokenizer that adds to the beginning of a text."""
        one, other = _JOINED
        if self.tokenizer.decode([*self.spelled(one), *self.spelled(other)]) != one + other:
            raise BadInput("copying needs a tokenizer whose tokens' texts can be joined, such as a byte-level one")


class _Place:
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

    def holds_text(self, token: int) -> bool:
        """Whether ``token``, which follows, is part of the edited text."""
        return False

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


class _Words(_Place):
    """``tokens`` follow from index ``at`` on, one after the other, and then another state. ``text``: they are shown."""

    __slots__ = ("at", "text", "then", "tokens")

    def __init__(self, program: CopyProgram, tokens: Sequence[int], at: int, then: Then, *, text: bool = False) -> None:
        super().__init__(program)
        self.tokens, self.at, self.then, self.text = tokens, at, then, text

    def follows(self) -> tuple[int, ...]:
        return (self.tokens[self.at],)

    def advance(self, token: int) -> State | None:
        if token != self.tokens[self.at]:
            return None
        return _after(self.program, self.tokens, self.at + 1, self.then, text=self.text)

    def holds_text(self, token: int) -> bool:
        return self.text


def _after(program: CopyProgram, tokens: Sequence[int], at: int, then: Then, *, text: bool = False) -> State:
    return _Words(program, tokens, at, then, text=text) if at < len(tokens) else then()


class _Boundary(_Place):
    """Between two directives: at the beginning, and behind a copied span. ``whole``: the answer may end here."""

    __slots__ = ("complete",)

    def __init__(self, program: CopyProgram, *, whole: bool) -> None:
        super().__init__(program)
        self.complete = whole

    def follows(self) -> tuple[int, ...] | None:
        return tuple(sorted(self.program.begins_directive))

    def advance(self, token: int) -> State | None:
        return _directive(self.program, token)


class _NewLines(_Place):
    """In generated text. ``start``: at the beginning of a line, where the answer may end and a directive may begin."""

    __slots__ = ("complete",)

    def __init__(self, program: CopyProgram, *, start: bool) -> None:
        super().__init__(program)
        self.complete = start

    def follows(self) -> tuple[int, ...] | None:
        return None

    def advance(self, token: int) -> State | None:
        if self.complete and token in self.program.begins_directive:
            return _directive(self.program, token)
        known = 0 <= token < len(self.program.tokenizer)
        added = self.program.tokenizer.token_bytes(token) if known else None
        return _NewLines(self.program, start=added.endswith(_NEWLINE)) if added else None

    def holds_text(self, token: int) -> bool:
        return not (self.complete and token in self.program.begins_directive)


class _Choice(_Place):
    """In a directive, where ``copy`` and ``generate`` begin with the same ``at`` tokens."""

    __slots__ = ("at",)

    def __init__(self, program: CopyProgram, at: int) -> None:
        super().__init__(program)
        self.at = at

    def follows(self) -> tuple[int, ...]:
        return tuple(sorted({self.program.copy[self.at], self.program.generate[self.at]}))

    def advance(self, token: int) -> State | None:
        return _directive(self.program, token, self.at)


class _LineNumber(_Place):
    """In a number of a copy: ``number`` is its beginning, ``first`` the span's first line once that is known."""

    __slots__ = ("first", "number")

    def __init__(self, program: CopyProgram, number: _Number, first: int = 0) -> None:
        super().__init__(program)
        self.number, self.first = number, first

    def follows(self) -> tuple[int, ...]:
        found = [token for token, one in self.number.more.items() if one.largest >= self.first]
        if self._may_end:
            found.append(self._end[0])
        return tuple(sorted(found))

    @property
    def _may_end(self) -> bool:
        return self.number.value >= max(self.first, 1)

    @property
    def _end(self) -> tuple[int, ...]:
        return self.program.close if self.first else self.program.to

    def advance(self, token: int) -> State | None:
        longer = self.number.more.get(token)
        if longer is not None and longer.largest >= self.first:
            return _LineNumber(self.program, longer, self.first)
        if not self._may_end or token != self._end[0]:
            return None
        program, first, number = self.program, self.first, self.number.value

        def then() -> State:
            if first:
                return _after(
                    program, program.span(first, number), 0, lambda: _Boundary(program, whole=True), text=True
                )
            return _LineNumber(program, program.numbers, number)

        return _after(program, self._end, 1, then)


def _directive(program: CopyProgram, token: int, at: int = 0) -> State | None:
    """The state after the token of index ``at`` of a directive."""
    copies = program.copy[at : at + 1] == (token,)
    generates = program.generate[at : at + 1] == (token,)
    if copies and generates:
        return _Choice(program, at + 1)
    if copies:
        return _after(program, program.copy, at + 1, lambda: _LineNumber(program, program.numbers))
    if generates:
        return _after(program, program.generate, at + 1, lambda: _NewLines(program, start=True))
    return None

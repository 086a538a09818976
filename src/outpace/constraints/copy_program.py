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
from functools import cached_property

from outpace.constraints.copy_automaton import Boundary, Number, Role, State
from outpace.core.constraint import Bits, ConstraintState, bits_of
from outpace.core.errors import BadInput
from outpace.core.lru import Lru
from outpace.core.text import encoded
from outpace.models.base import ChatTokenizer

MOST_LINES = 9999
"""Lines of a text that can be copied from: each number is spelled once when the automaton is made."""
COPY, TO, CLOSE, GENERATE = "@@ copy(", "-", ")\n", "@@ generate\n"
_JOINED = "if x:\n", "    y = 2\n"

_TEXTS: Lru[tuple[str, int], Bits] = Lru(4)
"""The tokens that add to a text, by the tokenizer's fingerprint and the vocabulary's size."""


def lines_of(text: str) -> list[str]:
    """The lines of a text, each with its newline; the last gets one where it has none."""
    lines = text.split("\n")
    return [f"{line}\n" for line in (lines[:-1] if lines[-1] == "" else lines)]


class CopyProgram:
    """Programs over the lines of ``text``: a :class:`~outpace.core.constraint.Constraint`.

    ``ordered``: each span begins behind the one before, as in every edit that moves and repeats no lines.

    Raises BadInput for a text without lines or of more than :data:`MOST_LINES`, and where the tokenizer does not write
    the text back as it was.
    """

    def __init__(self, text: str, tokenizer: ChatTokenizer, *, ordered: bool = True) -> None:
        self.lines, self.ordered = lines_of(text), ordered
        if not self.lines:
            raise BadInput("there are no lines to copy from: the text to edit is empty")
        if len(self.lines) > MOST_LINES:
            raise BadInput(
                f"the text to edit has {len(self.lines):,} lines, and the limit is {MOST_LINES:,}; give a part"
            )
        self.tokenizer = tokenizer
        self._masks: dict[tuple[int, ...], Bits] = {}
        self._spans: dict[tuple[int, int], tuple[int, ...]] = {}
        self._check_tokenizer()
        self._check_lines()
        self.copy, self.to, self.close, self.generate = map(self.spelled, (COPY, TO, CLOSE, GENERATE))
        self.begins_directive = frozenset({self.copy[0], self.generate[0]})

    def __repr__(self) -> str:
        return f"CopyProgram({len(self.lines)} lines)"

    def begin(self) -> ConstraintState:
        return Boundary(self, whole=False)

    def accepts(self, text: str) -> bool:
        """Whether a program can have ``text`` as its edited text."""
        return not text or text.endswith("\n")

    def roles(self) -> Callable[[int], Role]:
        """For one answer: told each of its tokens in turn, what it is."""
        at: State | None = Boundary(self, whole=False)

        def tell(token: int) -> Role:
            nonlocal at
            before, at = at, None if at is None else at.advance(token)
            return "directive" if before is None else before.role(token)

        return tell

    def shown(self) -> Callable[[int], bool]:
        """For one answer: told each of its tokens in turn, whether it is part of the edited text."""
        role = self.roles()
        return lambda token: role(token) != "directive"

    def behind(self, copied: int) -> int:
        """The line behind which the next span begins, where ``copied`` is the last line that was copied; 0: none."""
        return copied if self.ordered else 0

    def directives(self, copied: int, *, generating: bool = False) -> tuple[tuple[int, ...], ...]:
        """The directives that may follow; ``generating``: behind new lines, which no further ones follow."""
        copies = (self.copy,) if self.behind(copied) < len(self.lines) else ()
        return copies if generating else (*copies, self.generate)

    def spelled(self, text: str) -> tuple[int, ...]:
        """The usual tokens of a text. Raises BadInput where they do not spell it."""
        tokens = encoded(self.tokenizer, [text])[0]
        if b"".join(self.tokenizer.token_bytes(token) or b"" for token in tokens) != text.encode():
            raise BadInput(
                f"copying needs a tokenizer that writes texts back as they were; this one changes {text[:40]!r}, where "
                "it may see a special token, or write a character in another form"
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
    def numbers(self) -> Number:
        """The spellings of all line numbers."""
        root = Number(largest=len(self.lines))
        for number in range(1, len(self.lines) + 1):
            at = root
            for token in self.spelled(str(number)):
                at = at.more.setdefault(token, Number())
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

    def line_beginnings(self, size: int, directives: frozenset[int]) -> Bits:
        """The set of all tokens that may begin a new line, and of those directives that may begin there."""
        return self.any_text(size) & ~self.mask(sorted(self.begins_directive - directives), size)

    def _check_lines(self) -> None:
        """Raise BadInput, of the first such line where there is one, for a text that the tokenizer changes."""
        try:
            self.span(1, len(self.lines))
        except BadInput:
            for line in self.lines:
                self.spelled(line)
            raise

    def _check_tokenizer(self) -> None:
        """Texts of several spans are joined: raise BadInput for a tokenizer that adds to the beginning of a text."""
        one, other = _JOINED
        if self.tokenizer.decode([*self.spelled(one), *self.spelled(other)]) != one + other:
            raise BadInput("copying needs a tokenizer whose tokens' texts can be joined, such as a byte-level one")

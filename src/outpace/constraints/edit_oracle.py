"""Programs for edits that are known: what a model that always chose right would write, and the lesson to follow one.

:func:`edit_steps` finds the copied and the new lines of an edit, :func:`program_tokens` spells them, and
:class:`Rehearsed` is the constraint under which a target writes exactly these tokens, for measurements of what copying
costs and gains apart from what a model chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TypeAlias

from outpace.constraints.copy_program import CopyProgram, lines_of
from outpace.core.constraint import Bits, ConstraintState, bits_of
from outpace.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class Copy:
    """Lines ``first`` to ``last`` of the text, counted from 1."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Generate:
    """New lines."""

    text: str


Step: TypeAlias = Copy | Generate


def edit_steps(before: str, after: str) -> list[Step]:
    """The steps that make ``after`` of ``before`` (its last line with a newline), by a diff of their lines."""
    old, new = lines_of(before), lines_of(after)
    steps: list[Step] = []
    for kind, first, last, begin, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            steps.append(Copy(first + 1, last))
        elif begin < end:
            steps.append(Generate("".join(new[begin:end])))
    return steps


def worthwhile(steps: Sequence[Step], program: CopyProgram) -> list[Step]:
    """The same edit, with spans generated that take no more tokens than the directive that would copy them."""
    found: list[Step] = []
    for one in steps:
        text = one.text if isinstance(one, Generate) else "".join(program.lines[one.first - 1 : one.last])
        if isinstance(one, Copy) and len(program.spelled(text)) > len(directive(program, one)):
            found.append(one)
        elif found and isinstance(before := found[-1], Generate):
            found[-1] = Generate(before.text + text)
        else:
            found.append(Generate(text))
    return found


def directive(program: CopyProgram, step: Copy) -> list[int]:
    """The tokens of the directive that copies lines."""
    first, last = (program.spelled(str(number)) for number in (step.first, step.last))
    return [*program.copy, *first, *program.to, *last, *program.close]


def program_tokens(program: CopyProgram, steps: Sequence[Step]) -> list[int]:
    """The tokens of an answer that takes these steps. Raises BadInput for lines that the text does not have."""
    tokens: list[int] = []
    for step in steps:
        if isinstance(step, Generate):
            tokens += [*program.generate, *_new_lines(program, step.text)]
            continue
        if not 1 <= step.first <= step.last <= len(program.lines):
            raise BadInput(f"lines {step.first}-{step.last} cannot be copied: the text has {len(program.lines)}")
        tokens += [*directive(program, step), *program.span(step.first, step.last)]
    return tokens


def _new_lines(program: CopyProgram, text: str) -> list[int]:
    """The tokens of new lines. At the beginning of one, the token that begins directives is spelled in parts."""
    tokens: list[int] = []
    starts = True
    for token in program.spelled(text):
        if starts and token in program.begins_directive:
            whole = program.text_of(token)
            parts = [*program.spelled(whole[:1]), *program.spelled(whole[1:])] if len(whole) > 1 else []
            if not parts or parts[0] in program.begins_directive:
                raise BadInput(f"a new line that begins with {whole!r} cannot be told from a directive")
            tokens += parts
        else:
            tokens.append(token)
        starts = program.text_of(token).endswith("\n")
    return tokens


class Rehearsed:
    """A constraint under which only one answer can be given: ``tokens``, a program of ``program``.

    What it calls forced is what ``program`` forces, so that whoever drafts along it knows no more than usual.
    """

    def __init__(self, program: CopyProgram, tokens: Sequence[int]) -> None:
        self.program, self.tokens = program, tuple(tokens)

    def begin(self) -> ConstraintState:
        return _Line(self, 0, self.program.begin())

    def accepts(self, text: str) -> bool:
        return self.program.accepts(text)

    def shown(self) -> Callable[[int], bool]:
        return self.program.shown()


class _Line:
    """A place of a rehearsed answer, and the state of its program there."""

    __slots__ = ("_at", "_of", "_state")

    def __init__(self, of: Rehearsed, at: int, state: ConstraintState) -> None:
        self._of, self._at, self._state = of, at, state

    @property
    def complete(self) -> bool:
        return self._at == len(self._of.tokens)

    def allowed(self, size: int) -> Bits:
        return bits_of(self._of.tokens[self._at : self._at + 1], size)

    def advance(self, token: int) -> _Line | None:
        if self.complete or token != self._of.tokens[self._at]:
            return None
        after = self._state.advance(token)
        if after is None:
            raise BadInput(f"the rehearsed answer is no program: its token {self._at + 1} is not allowed")
        return _Line(self._of, self._at + 1, after)

    def forced(self) -> Sequence[int]:
        return self._state.forced()

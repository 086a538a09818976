"""The program in an answer to a code task: the function that was asked for, with what it needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from textwrap import dedent

from outpace.prompts.task import CodeTests

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_OPENED = re.compile(r"^[ \t]*```[^\n]*\n", re.MULTILINE)
_BEGINS = re.compile(r"^(?:import |from |def |async def |class |@|[A-Za-z_]\w* *(?::[^=\n]+)?= )", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import (?:\([^)]*\)|[^\n]*)\n?", re.MULTILINE)
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
_ASSIGNS = (ast.Assign, ast.AnnAssign)
_OF_A_TRIAL = {"input", "print"}


def program_of(task: CodeTests, answer: str) -> str | None:
    """A program that defines the function, or None where the answer holds none.

    The first block of code that gives the function a body, behind the imports and helpers of the prompt; without fences
    the text from the first line of code on. Where nothing defines it, the answer is read as the rest of the prompt.
    What follows the last line up to which the program is valid Python is left out (prose, or code that was cut off),
    and of what follows the function all that is no definition: calls of it, and tests of the answer's own.
    """
    defines = re.compile(rf"^(?:async\s+)?def\s+{re.escape(task.entry_point)}\s*\(", re.MULTILINE)
    blocks = [dedent(block) for block in _FENCED.findall(answer) if block.strip()]
    begins = defines.search(task.prompt)
    before = _helpers(task.prompt[: begins.start()]) if begins else ""
    texts = [text for text in (*blocks, *map(_from_code, (*blocks, answer))) if defines.search(text)]
    if texts:
        return next(filter(None, (_valid(f"{before}\n{text}", task.entry_point) for text in texts)), None)
    body = (blocks[0] if blocks else answer).strip("\n")
    if begins is None or not body or re.match(r"def |class |@", body):
        return None
    beginning = task.prompt[begins.start() :].rstrip()
    if syntax_error(f"{before}\n{beginning}\n    pass"):  # the prompt goes on behind its code
        beginning = _OPENED.split(beginning)[0].rstrip().removesuffix("```").rstrip()
    found = (_valid(f"{before}\n{beginning}\n{one}", task.entry_point) for one in _indented(body))
    return max(filter(None, found), key=len, default=None)


def _from_code(text: str) -> str:
    start = _BEGINS.search(text)
    return text[start.start() if start else 0 :]


def _helpers(before: str) -> str:
    """What a prompt has before the function, without the words around it, and without a decorator."""
    code = _from_code(_OPENED.split(before)[-1]) if syntax_error(before) else before
    lines = code.split("\n")
    while lines and syntax_error("\n".join(lines)):
        lines.pop()
    return "\n".join(lines)


def _indented(body: str) -> Iterator[str]:
    """A function's body as it may have been meant: decoding takes spaces from the beginning of an answer."""
    yield body
    first, *rest = body.split("\n")
    yield "\n".join(["    " + first.lstrip(), *rest])
    if not body[0].isspace():
        yield "\n".join(f"    {line}" for line in (first, *rest))


def syntax_error(program: str) -> str | None:
    """What is wrong with a program's syntax; None: nothing."""
    try:
        ast.parse(program)
    except SyntaxError as error:
        return f"{error.msg}, line {error.lineno}"
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None


def _valid(program: str, name: str) -> str | None:
    """The longest beginning of ``program`` that is valid and gives the function a body; None: there is none."""
    lines = ("".join(_FUTURE.findall(program)) + _FUTURE.sub("", program)).split("\n")
    while lines:
        text = "\n".join(lines)
        if syntax_error(text) is None:
            tree = ast.parse(text)
            return _definitions(tree, text, name) if _has_body(tree, name) else None
        lines.pop()
    return None


def _definitions(tree: ast.Module, text: str, name: str) -> str:
    """The program without what it does behind the function's definition: trying it out, and what follows from that."""
    at = 1 + max(place for place, node in enumerate(tree.body) if getattr(node, "name", None) == name)
    kept, unknown = tree.body[:at], {name, *_OF_A_TRIAL}
    for node in tree.body[at:]:
        if _defines(node, unknown):
            kept.append(node)
        else:
            unknown |= _names(node, ast.Store)
    if len(kept) == len(tree.body):
        return text
    try:
        return ast.unparse(ast.Module(kept, []))
    except (RecursionError, ValueError):  # of deep expressions, and of text that f-strings cannot hold
        return text


def _defines(node: ast.stmt, unknown: set[str]) -> bool:
    """Whether a statement does no more than to define names, and reads none of ``unknown`` meanwhile."""
    if isinstance(node, ast.Try):
        handled = [one for handler in node.handlers for one in handler.body]
        return all(_defines(one, unknown) for one in (*node.body, *handled, *node.orelse, *node.finalbody))
    if isinstance(node, ast.If):
        inside = all(_defines(one, unknown) for one in (*node.body, *node.orelse))
        return inside and not _names(node.test, ast.Load) & unknown
    return isinstance(node, _DEFINES) or (isinstance(node, _ASSIGNS) and not _names(node, ast.Load) & unknown)


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}


def _has_body(tree: ast.Module, name: str) -> bool:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if len(node.body) > documented:
                return True
    return False

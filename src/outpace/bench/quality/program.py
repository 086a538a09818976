"""The program in an answer to a code task: the function that was asked for, with what it needs."""

from __future__ import annotations

import ast
import re

from outpace.prompts.task import CodeTests

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_BEGINS = re.compile(r"^(?:import |from |def |async def |class |@|[A-Za-z_]\w* *(?::[^=\n]+)?= )", re.MULTILINE)


def program_of(task: CodeTests, answer: str) -> str | None:
    """A program that defines the function, or None where the answer holds none.

    The first block of code that defines the function, behind the imports and helpers of the prompt; without fences the
    text from the first line of code on. Where nothing defines it, the answer is read as the rest of the prompt. What
    follows the last line up to which the program is valid Python is left out (prose, or code that was cut off).
    """
    defines = re.compile(rf"^(?:async\s+)?def\s+{re.escape(task.entry_point)}\s*\(", re.MULTILINE)
    blocks = [block for block in _FENCED.findall(answer) if block.strip()]
    begins = defines.search(task.prompt)
    before = task.prompt[: begins.start()] if begins else ""
    for text in (*blocks, answer):
        if defines.search(text):
            start = _BEGINS.search(text)
            return _valid(f"{before}\n{text[start.start() if start else 0 :]}", task.entry_point)
    body = (blocks[0] if blocks else answer).strip("\n")
    if begins is None or not body or re.match(r"def |class |@", body):
        return None
    if not body[0].isspace():
        body = "\n".join(f"    {line}" for line in body.split("\n"))
    return _valid(f"{task.prompt.rstrip()}\n{body}", task.entry_point)


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
    lines = program.split("\n")
    while lines:
        text = "\n".join(lines)
        if syntax_error(text) is None:
            return text if _has_body(ast.parse(text), name) else None
        lines.pop()
    return None


def _has_body(tree: ast.Module, name: str) -> bool:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if len(node.body) > documented:
                return True
    return False

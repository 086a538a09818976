"""Docstrings as Markdown, for the API reference: parameters become a list; examples and roles become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETER = re.compile(r"^(?:\*{0,2}\w+(?:, \*{0,2}\w+)*): ")
_ROLE = re.compile(r":(?:func|class|mod|meth|attr|data):`~?([^`]+)`")


class DocstringStyle(griffe.Extension):  # type: ignore[misc]
    """Rewrites every docstring that the reference reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring as Markdown.

    A paragraph of lines ``name: meaning`` becomes a list, each with the lines that are indented below it. A paragraph
    that begins with ``>>>`` becomes a block of code.
    """
    paragraphs = re.split(r"\n\s*\n", _ROLE.sub(r"`\1`", text).strip())
    return "\n\n".join([paragraphs[0], *map(_paragraph, paragraphs[1:])])


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if lines[0].startswith(">>>"):
        code = [re.sub(r"\s*# doctest:.*", "", re.sub(r"^(?:>>>|\.\.\.) ?", "", line)) for line in lines]
        return "\n".join(["```python", *code, "```"])
    if lines[0].strip() == "Options:":
        return ""  # the page lists the options once
    if _PARAMETER.match(lines[0]):
        return _listed(lines)
    return text


def _listed(lines: list[str]) -> str:
    items: list[list[str]] = []
    for line in lines:
        if _PARAMETER.match(line) or (not line.startswith(" ") and not items):
            items.append([line])
        elif items:
            items[-1].append(line.strip())
    listed = []
    for item in items:
        names, _, meaning = " ".join(item).partition(": ")
        listed.append("- " + ", ".join(f"`{name}`" for name in names.split(", ")) + f": {meaning}")
    return "\n".join(listed)

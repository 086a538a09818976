"""Where the API page's public names are declared, for mkdocstrings: ``outpace`` imports them on first use."""

from __future__ import annotations

import re
from typing import Any

import outpace

_MARK = re.compile(r"<!-- api: (.+?) -->")
_CALLABLE_ROOMS = {"bench": "outpace.bench.benchmark.bench", "certify": "outpace.certify.certify"}
"""Packages that are called like the function of their name."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page. ``<!-- api: NAME NAME -->`` becomes these entries; ``*`` is all other names."""
    named = {name for marked in _MARK.findall(markdown) for name in marked.split()}

    def entries(mark: re.Match[str]) -> str:
        names = rest(named) if mark[1] == "*" else mark[1].split()
        return "\n\n".join(map(entry, names)) or "None."

    return _MARK.sub(entries, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs calls this for every page. Roles of docstrings (``:func:`name```) are shown as code."""
    return re.sub(r":(?:func|class|mod|meth|attr|data):<code>~?", "<code>", html)


def rest(named: set[str]) -> list[str]:
    """The public names that the page does not name itself."""
    return [name for name in outpace.__all__ if name not in named and not name.startswith("__")]


def entry(name: str) -> str:
    """One name, as mkdocstrings reads it."""
    heading = f"outpace.{name}"
    return f"::: {declared_in(name)}\n    options:\n      heading: {heading}\n      toc_label: {heading}"


def declared_in(name: str) -> str:
    """The full path of a public name's declaration."""
    return _CALLABLE_ROOMS.get(name) or f"{getattr(outpace, name).__module__}.{name}"

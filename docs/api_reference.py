"""The API page: where public names are declared, for mkdocstrings, and the options of generate, stream and chat."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import outpace
from outpace.api.options import options, other_names

_MARK = re.compile(r"<!-- api: (.+?) -->")
_OPTIONS = "<!-- options of generate -->"
_CALLABLE_ROOMS = {"bench": "outpace.bench.benchmark.bench", "certify": "outpace.certify.certify"}
"""Packages that are called like the function of their name."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page. ``<!-- api: NAME NAME -->`` becomes these entries; ``*`` is all other names."""
    named = {name for marked in _MARK.findall(markdown) for name in marked.split()}

    def entries(mark: re.Match[str]) -> str:
        names = rest(named) if mark[1] == "*" else mark[1].split()
        return "\n\n".join(map(entry, names)) or "None."

    if _OPTIONS in markdown:
        markdown = markdown.replace(_OPTIONS, option_list())
    return _MARK.sub(entries, markdown)


def option_list() -> str:
    """The options of generate, stream and chat, with their other names and defaults."""
    entries = []
    for name, (_, option) in options().items():
        names = [name, *(other for other, meant in other_names().items() if meant == name)]
        spelled = ", ".join(f"<code>{one}</code>" for one in names)
        default = "" if option.default is None else f' <span class="default">Default: {_shown(option.default)}.</span>'
        text = re.sub(r"`(.+?)`", r"<code>\1</code>", escape(option.text))
        entries.append(f"<dt>{spelled}</dt><dd>{text}{default}</dd>")
    return f'<dl class="options">{"".join(entries)}</dl>'


def _shown(default: Any) -> str:
    return "none" if default in ((), {}) else f"<code>{escape(repr(default))}</code>"


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

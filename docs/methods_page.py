"""The methods page, generated from the registry: a table that can be filtered, and the settings of every method."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from outpace.methods.registry import MethodInfo, methods

TABLE = "<!-- methods: table -->"
SETTINGS = "<!-- methods: settings -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    if TABLE in markdown:
        markdown = markdown.replace(TABLE, filters() + table())
    return markdown.replace(SETTINGS, settings()) if SETTINGS in markdown else markdown


def filters() -> str:
    """The form above the table. Hidden until ``assets/methods.js`` runs: without scripts the table is complete."""
    families = dict.fromkeys(info.family for info in methods())
    answers = {"yes": "yes", "no": "no"}
    fields = [
        '<label>Search<input type="search" name="text" placeholder="name, paper, words"></label>',
        _choice("Family", "family", {name: name for name in families}),
        _choice("Needs training", "trained", answers),
        _choice("Needs a draft model", "draft", answers),
        _choice("Lossless", "lossless", answers),
    ]
    tally = '<div class="tally"><output aria-live="polite"></output><button type="reset">Show all</button></div>'
    return f'<form class="filters" aria-label="Filter the methods" hidden>{"".join(fields)}{tally}</form>\n\n'


def _choice(title: str, name: str, options: dict[str, str]) -> str:
    listed = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options.items())
    return f'<label>{title}<select name="{name}"><option value="">all</option>{listed}</select></label>'


def table() -> str:
    """Every registered method, a row each, with what the filters compare in ``data-`` attributes."""
    headings = "".join(f'<th scope="col">{one}</th>' for one in ("Method", "Family", "Needs", "Lossless", "Use"))
    body = "\n".join(_row(info) for info in methods())
    return f'<table class="methods">\n<thead><tr>{headings}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n'


def _row(info: MethodInfo) -> str:
    aliases = f'<span class="alias">{escape(", ".join(info.aliases))}</span>' if info.aliases else ""
    paper = f'<span class="paper">{escape(info.paper)}</span>' if info.paper.strip("-") else ""
    use = f'<p class="use">{escape(info.when_to_use)}</p>' if info.when_to_use else ""
    compared = {
        "family": info.family,
        "trained": _answer(info.trained),
        "draft": _answer("draft model" in info.needs),
        "lossless": _answer(info.lossless),
    }
    data = "".join(f' data-{name}="{escape(value)}"' for name, value in compared.items())
    name = f'<a href="#{anchor(info)}"><code>{escape(info.name)}</code></a>'
    return (
        f"<tr{data}><td>{name}{aliases}</td>"
        f'<td data-label="Family">{escape(info.family)}</td>'
        f'<td data-label="Needs">{escape(", ".join(info.needs)) or "nothing"}</td>'
        f'<td data-label="Lossless">{_answer(info.lossless)}</td>'
        f"<td><p>{escape(info.summary)}</p>{use}{paper}</td></tr>"
    )


def _answer(holds: bool) -> str:
    return "yes" if holds else "no"


def anchor(info: MethodInfo) -> str:
    """The id of a method's section."""
    return f"method-{info.name}"


def settings() -> str:
    """A section for every method: its settings with defaults."""
    return "\n\n".join(_section(info) for info in methods())


def _section(info: MethodInfo) -> str:
    head = f"### `{info.name}` {{#{anchor(info)}}}\n\n{info.summary}\n"
    fields = info.settings.model_fields
    if not fields:
        return f"{head}\nNo settings.\n"
    entries = (
        f"<dt><code>{escape(name)}</code></dt><dd>{escape(field.description or '')} "
        f'<span class="default">Default: <code>{escape(str(field.get_default(call_default_factory=True)))}</code>'
        "</span></dd>"
        for name, field in fields.items()
    )
    return f"{head}\n{_listing(entries)}\n"


def _listing(entries: Iterable[str]) -> str:
    return f'<dl class="options">{"".join(entries)}</dl>'

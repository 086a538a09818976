"""A report as one HTML file: ``templates/report.html``, filled in. No network, no script, light and dark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from outpace.bench.report import Report
from outpace.core.files import write_atomically


def write_page(report: Report, path: Path) -> None:
    """Write the page. The file appears whole or not at all."""
    write_atomically(path, render(report).encode())


def render(report: Report) -> str:
    """The page as text. Whatever the report holds is escaped."""
    return _environment().get_template("report.html").render(report=report)


@cache
def _environment() -> Environment:
    """Everything is escaped, and a misspelt name in a template is an error."""
    found = Environment(
        loader=PackageLoader("outpace.bench"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"known": known, "fact": fact, "unbroken": unbroken}
    return found


def known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names and values that say something; names without underscores."""
    return {key.replace("_", " "): value for key, value in values.items() if value not in (None, "", {}, [])}


def fact(value: Any) -> str:
    """A setting as text: lists and objects on one line, four digits of a fraction."""
    if isinstance(value, list | tuple):
        return ", ".join(map(fact, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {fact(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


def unbroken(sentence: str) -> str:
    """The sentence with its intervals kept on one line."""
    return re.sub(r", (?=[\d.,]+\])", ",\N{NO-BREAK SPACE}", sentence)

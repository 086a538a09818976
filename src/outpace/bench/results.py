"""What was measured, as the JSON object that it is; it can print itself, and write itself as JSON or as a page."""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from outpace.bench.report import Report
from outpace.bench.terminal import print_report

_WIDTH = 110  # columns of str()


@dataclass(frozen=True, slots=True)
class Results(ABC):
    """``result`` is the JSON object: plain numbers, text, lists and objects; what is undefined is None, never NaN.

    ``str()`` is the terminal's tables.
    """

    result: dict[str, Any]

    @property
    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the JSON object."""

    @property
    def complete(self) -> bool:
        """False where the run was interrupted: then only what all rows finished is counted."""
        return bool(self.result["complete"])

    @property
    def prompts_done(self) -> int:
        """How many prompts the results cover."""
        return max((row["prompts"] for row in self.rows), default=0)

    @abstractmethod
    def report(self) -> Report:
        """What the terminal and the page show."""

    def to_json(self) -> str:
        return json.dumps(self.result, ensure_ascii=False, allow_nan=False, indent=2)

    def write_html(self, path: str | Path) -> None:
        """Write the report as one HTML file without scripts or network. It appears whole or not at all."""
        from outpace.bench.page import write_page

        write_page(self.report(), Path(path))

    def print(self, console: Console) -> None:
        """Print the tables. They read well from 100 columns on."""
        print_report(self.report(), console)

    def __str__(self) -> str:
        text = io.StringIO()
        self.print(Console(file=text, width=_WIDTH, highlight=False))
        return text.getvalue()


def plain_figures(value: Any) -> Any:
    """``value`` as JSON may hold it: numbers (None for NaN and infinity), text, lists and objects; the rest as text."""
    if isinstance(value, Mapping):
        return {str(key): plain_figures(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_figures(item) for item in value]
    if isinstance(value, float):
        return value if value - value == 0 else None  # neither NaN nor infinite
    return value if value is None or isinstance(value, bool | int | str) else str(value)

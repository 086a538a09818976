"""The result of a study: claims with their verdicts, and a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.bench.figure_text import UNDEFINED, number
from outpace.bench.report import Cell, Heading, Report, Table, Tone
from outpace.bench.results import Results, plain_figures
from outpace.core.files import write_atomically

_TONES: Mapping[str, Tone] = {"confirmed": "good", "refuted": "bad", "undecided": "dim"}


class StudyReport(Results):
    """What a study found; ``rows`` are those of its table."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> StudyReport:
        return cls(plain_figures(result))

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.result["rows"]
        return found

    @property
    def prompts_done(self) -> int:
        return int(self.result["settings"]["prompts"])

    def write_plot(self, path: Path) -> None:
        """Write the plot as an SVG file, whole or not at all."""
        write_atomically(path, self.result["svg"].encode())

    def report(self) -> Report:
        result, columns = self.result, self.result["columns"]
        headings = [Heading(title=title, left=at == 0) for at, title in enumerate(columns.values())]
        claims = [
            Heading(title="claim", left=True),
            Heading(title="found", left=True),
            Heading(title="verdict", left=True),
        ]
        return Report(
            command=f"outpace study {result['study']}",
            headline=result["title"],
            model=str(result["model"].get("name", "")),
            version=result["version"],
            facts=[result["paper"], f"{result['seconds']:.0f} s"],
            notes=result["notes"],
            tables=[
                *([Table("Claims", claims, [_claim(one) for one in result["claims"]])] if result["claims"] else []),
                Table("Found", headings, [[_cell(row, name) for name in columns] for row in self.rows]),
            ],
            about={"Machine": result["machine"], "Model": result["model"]},
            settings=result["settings"],
        )


def _claim(one: Mapping[str, Any]) -> list[Cell]:
    interval = f" [{one['interval'][0]:.3g}, {one['interval'][1]:.3g}]" if one["interval"] else ""
    found = "" if one["found"] is None else f"{one['found']:.3g}{interval} ({one['test']})"
    return [Cell(one["says"]), Cell(found), Cell(one["verdict"], _TONES[one["verdict"]])]


def _cell(row: Mapping[str, Any], name: str) -> Cell:
    """A figure that a row has and that is undefined is told from one that it lacks."""
    return Cell(UNDEFINED if name in row and row[name] is None else _shown(row.get(name)))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return number(value, 3 if abs(value) < 10 else 1)
    return "" if value is None else str(value)

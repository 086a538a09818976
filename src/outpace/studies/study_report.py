"""The result of a study: claims with their verdicts, and a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outpace.bench.figure_text import UNDEFINED, number
from outpace.bench.report import Cell, Heading, Report, Table, Tone
from outpace.bench.results import Results, plain_figures
from outpace.core.files import write_atomically
from outpace.studies.claims import FROM, TO

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
        result, columns = self.result, figures_of(self.result["columns"])
        headings = [Heading(title=one.title, left=at == 0) for at, one in enumerate(columns)]
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
                Table("Found", headings, [[_cell(row, one) for one in columns] for row in self.rows]),
            ],
            about={"Machine": result["machine"], "Model": result["model"]},
            settings=result["settings"],
        )


def _claim(one: Mapping[str, Any]) -> list[Cell]:
    interval = f" [{one['interval'][0]:.3g}, {one['interval'][1]:.3g}]" if one["interval"] else ""
    found = "" if one["found"] is None else f"{one['found']:.3g}{interval} ({one['test']})"
    return [Cell(one["says"]), Cell(found), Cell(one["verdict"], _TONES[one["verdict"]])]


class Figure(NamedTuple):
    """A column that is shown: the figure ``name``, and the ``ends`` of its interval, where it has one."""

    title: str
    name: str
    ends: tuple[str, ...] = ()

    def interval(self, row: Mapping[str, Any]) -> str:
        """Of a row, as text; "" where there is none."""
        found = [row.get(one) for one in self.ends]
        return f"{shown(found[0])}–{shown(found[1])}" if found and None not in found else ""


def figures_of(columns: Mapping[str, str]) -> list[Figure]:
    """The columns of a study, an interval beside its figure."""
    found: list[Figure] = []
    for name, title in columns.items():
        if title in (FROM, TO):
            found[-1] = found[-1]._replace(ends=(*found[-1].ends, name))
        else:
            found.append(Figure(title, name))
    return found


def _cell(row: Mapping[str, Any], one: Figure) -> Cell:
    """A figure that a row has and that is undefined is told from one that it lacks."""
    missing = one.name in row and row[one.name] is None
    return Cell(UNDEFINED if missing else shown(row.get(one.name)), detail=one.interval(row))


def shown(value: Any) -> str:
    """A figure of a table, as text."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return number(value, 3 if abs(value) < 10 else 1)
    return "" if value is None else str(value)

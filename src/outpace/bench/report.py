"""What a report shows, whichever command measured it. All text is plain: whoever shows it escapes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outpace.bench.charts import Chart

Tone = Literal["", "good", "bad", "dim", "strong"]
Row = Mapping[str, Any]
"""A row of a result's JSON object."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table; ``detail`` stands behind the text, dimmed."""

    text: str
    tone: Tone = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """Above a table's column.

    ``definition``: the page's sentence about it; ``legend``: a few words below the table. ``left``: the
    column holds text, aligned to the left. ``terminal`` and ``page``: where it is shown.
    """

    title: str = ""
    definition: str = ""
    legend: str = ""
    left: bool = False
    terminal: bool = True
    page: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Headings, and as many cells in every row. ``lead`` stands above the page's table."""

    title: str
    headings: Sequence[Heading]
    rows: Sequence[Sequence[Cell]]
    lead: str = ""
    terminal: bool = True
    page: bool = True

    @property
    def legend(self) -> str:
        """A few words about the columns that need them, for the line below the table."""
        return "; ".join(f"{one.title}: {one.legend}" for one in self.headings if one.legend)

    def only(self, where: Literal["terminal", "page"]) -> Table:
        """The columns that are shown there."""
        kept = [i for i, one in enumerate(self.headings) if getattr(one, where)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, headings=[self.headings[i] for i in kept], rows=rows)


@dataclass(frozen=True, slots=True)
class Tile:
    """One large figure at the top of the page. ``colour`` is CSS."""

    name: str
    figure: str
    lines: Sequence[str]
    colour: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt; ``answers``: (method, the beginning that all share, the rest from the first difference on)."""

    id: str
    category: str
    prompt: str
    answers: Sequence[tuple[str, str, str]]
    equal: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """A measurement as it is shown.

    ``command``: outpace's, as in "outpace bench"; ``command_line``: all that the user typed, "" where nobody did.
    ``charts`` take the page's width, ``small_charts`` stand in pairs.
    """

    command: str
    headline: str
    model: str
    version: str
    facts: Sequence[str] = ()
    notes: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    small_charts: Sequence[Chart] = ()
    samples: Sequence[Sample] = ()
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Boxes of names and values: the machine, the model."""
    command_line: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def definitions(self) -> dict[str, str]:
        """What the page's columns mean, by their titles."""
        columns = [one for table in self.tables if table.page for one in table.only("page").headings]
        return {one.title: one.definition for one in columns if one.definition}


def gain(ci95: Sequence[float] | None, *, lower_is_better: bool = False) -> Tone:
    """Good where the whole interval of a ratio lies on the better side of 1, bad where it lies on the other."""
    if not ci95:
        return ""
    above, below = ci95[0] > 1, ci95[1] < 1
    better, worse = (below, above) if lower_is_better else (above, below)
    return "good" if better else "bad" if worse else ""

"""A report in the terminal: tables with their legends, notes, and the headline as the last line."""

from __future__ import annotations

from dataclasses import replace

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from outpace.bench.report import Cell, Report, Table

_NAME = 16  # columns of a name that are never given up
_STYLES = {"": "", "good": "green", "bad": "red", "dim": "dim", "strong": "bold"}


def print_report(report: Report, console: Console) -> None:
    """Print to ``console``. Reads well from 100 columns on."""
    for table in report.tables:
        if table.terminal:
            console.print(Text(f"\n{table.title}".rstrip(), style="bold"))
            shown, left_out = _fitting(table.only("terminal"), console)
            console.print(_drawn(shown))
            if legend := shown.legend:
                console.print(Text(legend, style="dim"))
            if left_out:
                console.print(Text(f"too wide for this terminal: {', '.join(left_out)} (see --json)", style="dim"))
    for note in report.notes:
        console.print(f"[yellow]note[/] {escape(note)}")
    console.print(Text(f"\n{report.headline}" if report.tables else report.headline, style="bold"))


def _fitting(table: Table, console: Console) -> tuple[Table, list[str]]:
    """The table with as many columns as the terminal is wide, from the left, and the titles of the others."""
    left_out: list[str] = []
    while len(table.headings) > 2 and _drawn(table).__rich_measure__(console, console.options).minimum > console.width:
        left_out.insert(0, table.headings[-1].title)
        table = replace(table, headings=table.headings[:-1], rows=[row[:-1] for row in table.rows])
    return table, left_out


def _drawn(table: Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for place, one in enumerate(table.headings):
        if one.left:  # text gives way where the terminal is narrow, figures never do
            longest = max((len(row[place].text) for row in table.rows), default=0)
            drawn.add_column(Text(one.title), overflow="fold", min_width=min(longest, _NAME))
        else:
            longest = max((len(_text(row[place])) for row in table.rows), default=0)
            drawn.add_column(Text(one.title), justify="right", no_wrap=True, min_width=max(longest, len(one.title)))
    for row in table.rows:
        drawn.add_row(*map(_text, row))
    return drawn


def _text(cell: Cell) -> Text:
    text = Text(cell.text, style=_STYLES[cell.tone])
    return text.append(f" {cell.detail}", style="dim") if cell.detail else text

"""A report in the terminal: tables with their legends, notes, and the headline as the last line."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from outpace.bench.report import Cell, Report, Table

_STYLES = {"": "", "good": "green", "bad": "red", "dim": "dim", "strong": "bold"}


def print_report(report: Report, console: Console) -> None:
    """Print to ``console``. Reads well from 100 columns on."""
    for table in report.tables:
        if table.terminal:
            console.print(Text(f"\n{table.title}".rstrip(), style="bold"))
            console.print(_drawn(table.only("terminal")))
            if legend := table.only("terminal").legend:
                console.print(Text(legend, style="dim"))
    for note in report.notes:
        console.print(f"[yellow]note[/] {escape(note)}")
    console.print(Text(f"\n{report.headline}" if report.tables else report.headline, style="bold"))


def _drawn(table: Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for one in table.headings:
        if one.left:  # text gives way where the terminal is narrow, figures never do
            drawn.add_column(Text(one.title), overflow="fold")
        else:
            drawn.add_column(Text(one.title), justify="right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(_text, row))
    return drawn


def _text(cell: Cell) -> Text:
    text = Text(cell.text, style=_STYLES[cell.tone])
    return text.append(f" {cell.detail}", style="dim") if cell.detail else text

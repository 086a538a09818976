"""The comparison in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outpace.bench.peers.words import Row, agreement, bounds, categories, comparisons, headline, label, notes, rows
from outpace.bench.words import number, times

_KEY = "same: answers equal to outpace's plain decoding, and the share before the first difference (rounding differs)"


def print_table(result: Mapping[str, Any], console: Console) -> None:
    """Print the headline, the rows, rates by task, the ratios and notes. Reads well from 100 columns on."""
    if not result["ours"] and not result["peers"]:
        console.print("No results.")
        return
    console.print(Text(headline(result), style="bold"))
    console.print()
    console.print(_rows(result))
    console.print(Text(_KEY, style="dim"))
    if len(categories(result)) > 1:
        console.print(Text("\ntokens/s by task", style="bold"))
        console.print(_tasks(result))
    console.print(Text("\noutpace over the best of the others, by task the best there", style="bold"))
    console.print(_ratios(result))
    for note in notes(result):
        console.print(f"[yellow]note[/] {escape(note)}")


def _rows(result: Mapping[str, Any]) -> Table:
    table = _table("library", "configuration")
    table.add_column("precision", max_width=20)
    for name in ("tok/s", "95 %", "TTFT ms", "MB", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows(result):
        table.add_row(
            _name(row, row["name"]),
            escape(row["config"]),
            escape(row["precision"] or "–"),
            Text("failed", style="red") if row["error"] else number(row["decode_tokens_per_second"]),
            Text(bounds(row["ci95"], 1).strip("[]").replace(", ", "–"), style="dim"),
            number(row["ttft_ms"], 0),
            number(row["memory_mb"], 0),
            agreement(row),
        )
    return table


def _tasks(result: Mapping[str, Any]) -> Table:
    table = _table("")
    for name in categories(result):
        table.add_column(escape(name), justify="right")
    measured = [row for row in rows(result) if not row["error"]]
    best = {name: max((row["by_category"][name] or 0 for row in measured), default=0) for name in categories(result)}
    for row in measured:
        rates = row["by_category"]
        cells = [Text(number(rates[name]), style="bold" if rates[name] == best[name] else "") for name in best]
        table.add_row(_name(row, label(row)), *cells)
    return table


def _ratios(result: Mapping[str, Any]) -> Table:
    table = _table("what")
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("95 %", justify="right", no_wrap=True)
    table.add_column("of", overflow="fold")
    for what, found, reading in comparisons(result):
        pair = f"{found['ours']} / {found['peer']}" if found["overall"] is not None else "not measured"
        table.add_row(what, _paint(found["overall"], found["ci95"], waits="wait" in reading), _dim(found), escape(pair))
    cells = result["ratio_to_best_peer"]["by_category"]
    for name, cell in cells.items() if len(cells) > 1 else ():
        painted = _paint(cell["ratio"], cell["ci95"], waits=False)
        table.add_row(f"  {escape(name)}", painted, _dim(cell), f"/ {escape(cell['peer'] or '–')}")
    return table


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True, max_width=34)
    return table


def _name(row: Row, name: str) -> Text:
    return Text(name, style="bold" if row["name"] == "outpace" else "")


def _dim(found: Mapping[str, Any]) -> Text:
    return Text(bounds(found["ci95"]).strip("[]").replace(", ", "–"), style="dim")


def _paint(ratio: float | None, ci95: list[float] | None, *, waits: bool) -> Text:
    """Green where the interval lies on our side of 1, red where it lies on theirs."""
    if not ci95:
        return Text(times(ratio))
    above, below = ci95[0] > 1, ci95[1] < 1
    good, bad = (below, above) if waits else (above, below)
    return Text(times(ratio), style="green" if good else "red" if bad else "")

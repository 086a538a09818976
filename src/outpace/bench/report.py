"""The result in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outpace.bench.words import (
    Row,
    categories,
    drafted,
    headline,
    interval,
    notes,
    number,
    parts,
    percent,
    split_text,
    times,
)

_KEY = (
    "time split: draft/score/accept/other, %; same: answers that are plain decoding's, ≈ those that part at a near tie"
)

_DRAFTING = (
    "rounds: those with a draft; tok/round: tokens of such a round; draft ms: a round; parts: who drafted, in how many "
    "rounds; cached: entries of caches"
)


def print_table(result: Mapping[str, Any], console: Console) -> None:
    """Print the headline, the methods, the speed-up by task, and notes. Reads well from 100 columns on."""
    if not result["methods"]:
        console.print("No results.")
        return
    console.print(Text(headline(result), style="bold"))
    console.print()
    console.print(_methods(result))
    console.print(Text(_KEY, style="dim"))
    if drafted(result):
        console.print(Text("\ndrafting", style="bold"))
        console.print(_drafting(result))
        console.print(Text(_DRAFTING, style="dim"))
    if drafted(result) and len(categories(result)) > 1:
        console.print(Text("\nspeed-up by task", style="bold"))
        console.print(_tasks(result))
    for note in notes(result):
        console.print(f"[yellow]note[/] {escape(note)}")


def _methods(result: Mapping[str, Any]) -> Table:
    table = _table()
    for name in ("tok/s", "speed-up", "95 %", "tok/fwd", "accepted", "TTFT ms", "same", "MB", "time split"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["methods"]:
        table.add_row(
            escape(row["method"]),
            number(row["decode_tokens_per_second"]),
            _paint(row),
            Text(_bounds(row), style="dim"),
            number(row["mean_acceptance_length"], 2),
            percent(row["acceptance_rate"]),
            number(row["ttft_ms"], 0),
            _same(row),
            number(row["peak_memory_mb"], 0),
            split_text(row),
        )
    return table


def _drafting(result: Mapping[str, Any]) -> Table:
    table = _table()
    for name in ("rounds", "tok/round", "draft ms", "parts", "cached", "evicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in drafted(result):
        caches = row["caches"]
        table.add_row(
            escape(row["method"]),
            percent(row["drafting_rounds"]),
            number(row["drafting_acceptance_length"], 2),
            number(row["draft_ms"], 2),
            parts(row["drafting_parts"]),
            " + ".join(f"{number(one['entries'], 0)} of {number(one['bound'], 0)}" for one in caches) or "–",
            " + ".join(number(one["evicted"], 0) for one in caches) or "–",
        )
    return table


def _tasks(result: Mapping[str, Any]) -> Table:
    table = _table()
    for name in categories(result):
        table.add_column(escape(name), justify="right")
    for row in drafted(result):
        cells = [row["by_category"].get(name) for name in categories(result)]
        table.add_row(escape(row["method"]), *(_paint(cell) if cell else Text("–") for cell in cells))
    return table


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("method", style="bold", no_wrap=True, max_width=16)
    return table


def _bounds(row: Row) -> str:
    return interval(row).strip("[]").replace(", ", "–")


def _paint(row: Row) -> Text:
    """Green where the interval lies above 1, red where it lies below."""
    low, high = row["speedup_ci95"] or (None, None)
    style = "green" if low is not None and low > 1 else "red" if high is not None and high < 1 else ""
    return Text(times(row["speedup"]), style=style)


def _same(row: Row) -> Text:
    found = row["identical"]
    if row["error"]:
        return Text("failed", style="red")
    if not found:
        return Text("lossless" if row["lossless"] else "lossy")
    text = Text(f"{found['same']}/{found['of']}")
    if found["same"] < found["of"]:
        text.append(f" ≈{found['near_ties']}", style="dim")
    return text

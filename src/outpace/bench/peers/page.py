"""The comparison as one HTML file, in the style of the bench's report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.bench.html import definitions, facts, footer, page, section, write_page
from outpace.bench.markup import tag, text
from outpace.bench.peers.chart import rate_chart
from outpace.bench.peers.words import DEFINITIONS, Row, agreement, bounds, comparisons, headline, label, notes, rows
from outpace.bench.words import number, times


def write_html(result: Mapping[str, Any], path: str | Path) -> None:
    """Write the report. The file appears whole or not at all."""
    write_page(render(result), path)


def render(result: Mapping[str, Any]) -> str:
    """The page."""
    parts = [_header(result), _tiles(result)]
    parts += [tag("p", text(note), class_="note") for note in notes(result)]
    parts += [
        section(
            "Decode rate by task",
            "Tokens per second after the first. Whiskers are 95 % intervals over prompts. outpace's rows are coloured.",
            rate_chart(result),
        ),
        section("All rows", "", tag("div", _table(result), class_="scroll")),
        _ratios(result),
        facts(result),
        definitions(DEFINITIONS),
        footer(result),
    ]
    return page(f"outpace bench-peers: {result['model'].get('name', '')}", parts)


def _header(result: Mapping[str, Any]) -> str:
    settings, machine = result["settings"], result["machine"]
    told = [
        str(result["model"].get("name", "")),
        f"{settings.get('prompts')} prompts, {settings.get('max_new_tokens')} tokens each, greedy",
        f"{machine.get('cpu')}, {machine.get('threads')} threads",
    ]
    return tag(
        "header",
        tag("p", "outpace bench-peers", class_="brand"),
        tag("h1", text(headline(result))),
        tag("p", text(" · ".join(told)), class_="lead"),
    )


def _tiles(result: Mapping[str, Any]) -> str:
    tiles = [
        tag(
            "div",
            tag("div", text(what), class_="name"),
            tag("div", text(times(found["overall"])), class_="big"),
            tag("div", text(bounds(found["ci95"])), class_="small"),
            tag("div", text(f"{found['ours']} over {found['peer']}"), class_="small"),
            tag("div", text(reading), class_="small"),
            class_="tile",
            style=f"--tone:var(--c{place})",
        )
        for place, (what, found, reading) in enumerate(comparisons(result), 1)
        if found["overall"] is not None
    ]
    return tag("div", *tiles, class_="tiles") if tiles else ""


def _table(result: Mapping[str, Any]) -> str:
    names = ["library", "version", "precision", "tok/s", "TTFT", "MB", "same"]
    head = "".join(tag("th", text(name), title=DEFINITIONS.get(name)) for name in names)
    body = "".join(tag("tr", *(tag("td", cell) for cell in _cells(row))) for row in rows(result))
    return tag("table", tag("thead", tag("tr", head)), tag("tbody", body))


def _cells(row: Row) -> list[str]:
    rate = tag("span", "failed", class_="bad", title=row["error"]) if row["error"] else ""
    if row["decode_tokens_per_second"]:
        around = tag("span", text(bounds(row["ci95"], 1)), class_="dim")
        rate += f" {text(number(row['decode_tokens_per_second']))} {around}"
    return [
        text(label(row)),
        text(row["version"] or "–"),
        text(row["precision"] or "–"),
        rate.strip() or "–",
        text(f"{number(row['ttft_ms'], 0)} ms" if row["ttft_ms"] else "–"),
        text(number(row["memory_mb"], 0)),
        text(agreement(row) or "–"),
    ]


def _ratios(result: Mapping[str, Any]) -> str:
    found = result["ratio_to_best_peer"]
    if not found["by_category"]:
        return ""
    head = "".join(tag("th", name) for name in ("task", "over the best peer there", "95 %", "that peer"))
    body = "".join(
        tag(
            "tr",
            *(tag("td", cell) for cell in (text(name), _ratio(cell), text(bounds(cell["ci95"])), text(cell["peer"]))),
        )
        for name, cell in found["by_category"].items()
    )
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", body))
    lead = f"{found['ours']} over the fastest row of any other library in the same task."
    return section("Against the best in each task", lead, tag("div", table, class_="scroll"))


def _ratio(cell: Mapping[str, Any]) -> str:
    low, high = cell["ci95"] or (None, None)
    tone = "good" if low is not None and low > 1 else "bad" if high is not None and high < 1 else None
    return tag("span", text(times(cell["ratio"])), class_=tone)

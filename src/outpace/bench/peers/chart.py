"""Decode rates as bars with intervals: all prompts together, then by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.bench.markup import tag, text
from outpace.bench.peers.words import Row, bounds, categories, label, rows
from outpace.bench.words import number

_HEIGHT, _BAR = 20, 10

Bar = tuple[Row, float, Sequence[float] | None]
"""A row, its rate, and the interval."""


def rate_chart(result: Mapping[str, Any]) -> str:
    """Every row that was measured, on one scale from 0; the fastest first in each block."""
    measured = [row for row in rows(result) if not row["error"] and row["decode_tokens_per_second"]]
    if not measured:
        return ""
    blocks: dict[str, list[Bar]] = {
        "all prompts": [(row, row["decode_tokens_per_second"], row["ci95"]) for row in measured]
    }
    for name in categories(result) if len(categories(result)) > 1 else ():
        bars = [(row, rate, row["by_category_ci95"][name]) for row in measured if (rate := row["by_category"][name])]
        blocks[name] = sorted(bars, key=lambda bar: -bar[1])
    longest = max(max(rate, *(ci95 or (0.0,))) for bars in blocks.values() for _, rate, ci95 in bars)
    palette = _colours(measured)
    drawn = [
        tag("div", tag("h4", text(name)), *(_line(bar, longest, palette, name) for bar in bars), class_="block")
        for name, bars in blocks.items()
    ]
    return tag("div", *drawn, class_="chart wide")


def _colours(measured: Sequence[Row]) -> dict[str, str]:
    """Colours for outpace's rows, grey for the others."""
    ours = [label(row) for row in measured if row["name"] == "outpace"]
    return {name: f"var(--c{i % 8 + 1})" for i, name in enumerate(ours)}


def _line(bar: Bar, longest: float, palette: Mapping[str, str], where: str) -> str:
    row, rate, ci95 = bar
    name, middle = label(row), _HEIGHT / 2
    colour = palette.get(name, "var(--plain)")
    drawn = tag(
        "rect", x=0, width=f"{100 * rate / longest:.2f}%", y=middle - _BAR / 2, height=_BAR, fill=colour, class_="bar"
    )
    drawn += tag("circle", cx=f"{100 * rate / longest:.2f}%", cy=middle, r=4, class_="point")
    if ci95:
        low, high = (f"{100 * bound / longest:.2f}%" for bound in ci95)
        drawn += tag("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker")
        drawn += "".join(tag("line", x1=x, x2=x, y1=middle - 4, y2=middle + 4, class_="whisker") for x in (low, high))
    told = f"{name}, {where}: {number(rate)} tokens/s {bounds(ci95, 1)}".rstrip()
    track = tag("svg", drawn, class_="track", height=_HEIGHT, role="img", aria_label=told)
    value = tag("span", tag("b", text(number(rate))), " ", text(bounds(ci95, 1)), class_="value")
    heading = tag("span", text(name), class_="name", style=f"color:{colour}" if name in palette else None)
    return tag("div", heading, track, value, class_="row", title=told)

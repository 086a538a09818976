"""The report's charts, as inline SVG and HTML that need no script.

Rows are HTML, so that labels stay readable on a narrow screen; their tracks are SVG with positions in per cent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outpace.bench.markup import tag, text
from outpace.bench.words import Row, categories, drafted, interval, number, percent, times
from outpace.core.metrics import PHASES

_TICKS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
_MAX_DOTS = 400
_COLOURS = 8

Colours = Mapping[str, str]
Scale = Callable[[float], float]


def colours(result: Mapping[str, Any]) -> dict[str, str]:
    """A colour of the page's palette for every method; plain decoding is grey."""
    names = [row["method"] for row in drafted(result)]
    return {"none": "var(--plain)"} | {name: f"var(--c{i % _COLOURS + 1})" for i, name in enumerate(names)}


def speedup_chart(result: Mapping[str, Any], palette: Colours) -> str:
    """Speed-up of every method, overall (with a dot a prompt) and by task, with intervals, on a log scale."""
    rows = [row for row in drafted(result) if row["speedup"]]
    if not rows:
        return ""
    dots = {
        row["method"]: [
            (entry["id"], value) for entry in result["per_prompt"] if (value := entry["speedup"].get(row["method"]))
        ][:_MAX_DOTS]
        for row in rows
    }
    scale, ticks = _log_scale(rows, [value for found in dots.values() for _, value in found])
    blocks = [_block("all prompts", [(row, dots[row["method"]]) for row in rows], palette, scale, ticks)]
    for category in categories(result) if len(categories(result)) > 1 else ():
        cells = [cell for row in rows if (cell := row["by_category"].get(category)) and cell["speedup"]]
        blocks.append(_block(category, [(cell, ()) for cell in cells], palette, scale, ticks))
    labels = "".join(
        tag("span", text(f"{tick:g}x"), style=f"left:{scale(tick):.2f}%", class_="one" if tick == 1 else None)
        for tick in ticks
    )
    axis = tag("div", tag("span"), tag("div", labels, class_="axis"), tag("span"), class_="row")
    return tag("div", *blocks, axis, class_="chart")


def _log_scale(rows: Sequence[Row], dots: Sequence[float]) -> tuple[Scale, list[float]]:
    values = [1.0, *dots]
    for row in rows:
        for cell in (row, *row["by_category"].values()):
            values += [cell["speedup"] or 1.0, *(cell["speedup_ci95"] or ())]
    low, high = math.log(max(min(values), 0.02) * 0.94), math.log(max(*values, 1.25) * 1.06)
    ticks = [1.0]
    for tick in sorted(_TICKS, key=lambda each: abs(math.log(each))):  # outwards from 1, where there is room
        apart = min(abs(math.log(tick / other)) for other in ticks)
        if low < math.log(tick) < high and apart > 0.14 * (high - low):
            ticks.append(tick)
    return lambda value: 100 * (math.log(max(value, 0.02)) - low) / (high - low), ticks


def _block(
    title: str,
    rows: Sequence[tuple[Row, Sequence[tuple[str, float]]]],
    palette: Colours,
    scale: Scale,
    ticks: Sequence[float],
) -> str:
    lines = []
    for row, dots in rows:
        colour, value = palette[row["method"]], scale(row["speedup"])
        middle, height = (15.0, 30.0) if dots else (10.0, 20.0)
        grid = "".join(
            tag(
                "line",
                x1=f"{scale(tick):.2f}%",
                x2=f"{scale(tick):.2f}%",
                y1=0,
                y2="100%",
                class_="one" if tick == 1 else "grid",
            )
            for tick in ticks
        )
        left, right = sorted((scale(1.0), value))
        bar = tag(
            "rect", x=f"{left:.2f}%", width=f"{right - left:.2f}%", y=middle - 5, height=10, fill=colour, class_="bar"
        )
        cloud = "".join(
            tag(
                "circle",
                tag("title", text(f"{name}: {times(each)}")),
                cx=f"{scale(each):.2f}%",
                cy=middle + (i * 7 % 11 - 5) * 1.9,  # a fixed scatter, so that equal values can be told apart
                r=2.2,
                fill=colour,
                class_="dot",
            )
            for i, (name, each) in enumerate(dots)
        )
        label = f"{row['method']}, {title}: {times(row['speedup'])} {interval(row)}".rstrip()
        track = tag("svg", grid, bar, cloud, _whisker(row, scale, middle), class_="track", height=height, role="img",
                    aria_label=label)  # fmt: skip
        lines.append(
            tag(
                "div",
                tag("span", text(row["method"]), class_="name", style=f"color:{colour}"),
                track,
                tag("span", tag("b", text(times(row["speedup"]))), " ", text(interval(row)), class_="value"),
                class_="row",
                title=label,
            )
        )
    return tag("div", tag("h4", text(title)), *lines, class_="block")


def _whisker(row: Row, scale: Scale, middle: float) -> str:
    at = f"{scale(row['speedup']):.2f}%"
    point = tag("circle", cx=at, cy=middle, r=4, class_="point")
    if not row["speedup_ci95"]:
        return point
    low, high = (f"{scale(bound):.2f}%" for bound in row["speedup_ci95"])
    ends = "".join(tag("line", x1=x, x2=x, y1=middle - 4, y2=middle + 4, class_="whisker") for x in (low, high))
    return tag("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker") + ends + point


def position_chart(result: Mapping[str, Any], palette: Colours) -> str:
    """Share of rounds in which the draft token at each position was accepted, one line a method."""
    series = {
        row["method"]: row["per_position_acceptance"] for row in drafted(result) if row["per_position_acceptance"]
    }
    depth = max((i + 1 for line in series.values() for i, share in enumerate(line) if share >= 0.005), default=0)
    if depth == 0:
        return ""
    width, height, left, right, top, bottom = 560, 280, 44, 12, 10, 40
    highest = max(max(line) for line in series.values())
    step = next(size for size in (0.05, 0.1, 0.2, 0.25) if highest <= 4 * size or size == 0.25)
    levels = [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]

    def x(position: float) -> float:
        return left + (width - left - right) * (position - 1) / max(1, depth - 1)

    def y(share: float) -> float:
        return height - bottom - (height - top - bottom) * share / levels[-1]

    parts = []
    for level in levels:
        parts.append(tag("line", x1=left, x2=width - right, y1=y(level), y2=y(level), class_="grid"))
        parts.append(tag("text", text(percent(level)), x=left - 6, y=y(level) + 4, text_anchor="end"))
    stride = max(1, math.ceil(depth / 12))
    parts += [
        tag("text", text(position), x=x(position), y=height - bottom + 18, text_anchor="middle")
        for position in range(1, depth + 1, stride)
    ]
    middle = (left + width - right) / 2
    parts.append(tag("text", "position of the draft token", x=middle, y=height - 4, text_anchor="middle"))
    for name, line in series.items():
        points = [(x(i + 1), y(share)) for i, share in enumerate(line[:depth])]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(tag("polyline", points=path, fill="none", stroke=palette[name], stroke_width=2))
        for i, (px, py) in enumerate(points):
            note = tag("title", text(f"{name}, position {i + 1}: {percent(line[i])}"))
            parts.append(tag("circle", note, cx=px, cy=py, r=3.2, fill=palette[name]))
    drawing = tag("svg", *parts, viewBox=f"0 0 {width} {height}", class_="lines", role="img",
                  aria_label="accepted draft tokens by position")  # fmt: skip
    return legend({name: palette[name] for name in series}) + drawing


def split_chart(result: Mapping[str, Any]) -> str:
    """Milliseconds of decoding per token, split into draft, score, accept and other."""
    rows = [
        row for row in result["methods"] if row["decode_tokens_per_second"] and row["time_split"]["score"] is not None
    ]
    if not rows:
        return ""
    longest = max(1000 / row["decode_tokens_per_second"] for row in rows)
    lines = []
    for row in rows:
        cost, at, parts = 1000 / row["decode_tokens_per_second"], 0.0, []
        for phase in PHASES:
            share = row["time_split"][phase]
            size = 100 * share * cost / longest
            note = tag("title", text(f"{row['method']}, {phase}: {share * cost:.2f} ms a token, {percent(share)}"))
            parts.append(tag("rect", note, x=f"{at:.2f}%", width=f"{size:.2f}%", height=20, fill=f"var(--{phase})"))
            at += size
        lines.append(
            tag(
                "div",
                tag("span", text(row["method"]), class_="name"),
                tag("svg", *parts, class_="track", height=20, role="img", aria_label=f"time split of {row['method']}"),
                tag("span", tag("b", text(f"{number(cost, 1)} ms")), class_="value"),
                class_="row",
            )
        )
    return legend({phase: f"var(--{phase})" for phase in PHASES}) + tag("div", *lines, class_="chart")


def legend(entries: Mapping[str, str]) -> str:
    """Names beside their colours."""
    keys = [tag("span", tag("i", style=f"background:{colour}"), text(name)) for name, colour in entries.items()]
    return tag("div", *keys, class_="legend")

"""Plots of studies, as SVG that stands alone: lines over a figure, with bands for intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from outpace.bench.charts import ticks

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d")
_WIDTH, _HEIGHT = 760, 400
_SLANTED = 70
"""More height below the axis, for names in place of numbers."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 560, 40, 350


class PlotPoint(NamedTuple):
    """A point of a line; ``low`` and ``high``: its interval, where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines by name. ``logarithmic``: the x axis, whose values must be above 0. ``labels``: what stands at x values in
    place of numbers."""

    title: str
    x_axis: str
    y_axis: str
    series: Mapping[str, Seq[PlotPoint]]
    logarithmic: bool = False
    labels: Mapping[float, str] = field(default_factory=dict)

    def public(self) -> dict[str, Any]:
        series = {name: [list(point) for point in points] for name, points in self.series.items()}
        axes = {"x_axis": self.x_axis, "y_axis": self.y_axis, "logarithmic": self.logarithmic}
        labels = [[x, label] for x, label in self.labels.items()]
        return {"title": self.title, **axes, "series": series, "labels": labels}

    def svg(self) -> str:
        """The plot. Text in it is escaped."""
        points = [point for line in self.series.values() for point in line]
        if not points:
            raise ValueError("there is nothing to plot")
        lowest = [value for one in points for value in (one.y, one.low) if value is not None]
        highest = [value for one in points for value in (one.y, one.high) if value is not None]
        marks = ticks([0.0, *lowest, *highest])
        xs = sorted({point.x for point in points})
        at_x, at_y = self._across(xs), _up(marks)
        height = _HEIGHT + (_SLANTED if self.labels else 0)
        parts = [_text(_LEFT, 22, self.title, size=15, weight="bold")]
        for mark in marks:
            y = at_y(mark)
            parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#cbd5e1"/>')
            parts.append(_text(_LEFT - 6, y + 4, f"{mark:g}", anchor="end"))
        parts += [self._mark(x, at_x(x)) for x in (xs if self.labels else _few(xs))]
        parts.append(_text((_LEFT + _RIGHT) / 2, height - 10, self.x_axis, anchor="middle"))
        turn = f'transform="rotate(-90 16 {(_TOP + _BOTTOM) / 2:.0f})"'
        parts.append(_text(16, (_TOP + _BOTTOM) / 2, self.y_axis, anchor="middle", more=turn))
        for number, (name, line) in enumerate(self.series.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            parts += _drawn(name, sorted(line), colour, number, at_x, at_y, joined=not self.labels)
        body = "\n".join(parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            f'role="img" aria-label="{escape(self.title)}">\n'
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
        )

    def _mark(self, x: float, at: float) -> str:
        """What stands below the axis: names are longer than numbers, and slanted so that they do not overlap."""
        if x not in self.labels:
            return _text(at, _BOTTOM + 18, f"{x:g}", anchor="middle")
        turn = f'transform="rotate(-35 {at:.1f} {_BOTTOM + 16})"'
        return _text(at, _BOTTOM + 16, self.labels[x], anchor="end", more=turn)

    def _across(self, xs: Seq[float]) -> Any:
        scaled = math.log if self.logarithmic else float
        low, high = scaled(xs[0]), scaled(xs[-1])
        span = (high - low) or 1.0
        return lambda x: _LEFT + 12 + (_RIGHT - _LEFT - 24) * (scaled(x) - low) / span


def _up(marks: Seq[float]) -> Any:
    return lambda y: _BOTTOM - (_BOTTOM - _TOP) * (y - marks[0]) / (marks[-1] - marks[0])


def _few(xs: Seq[float]) -> Seq[float]:
    """At most twelve, so that their labels do not touch."""
    return xs[:: max(1, math.ceil(len(xs) / 12))]


def _drawn(
    name: str, line: Seq[PlotPoint], colour: str, number: int, at_x: Any, at_y: Any, *, joined: bool
) -> list[str]:
    """``joined``: by a line, with a band of the intervals; else each point has its own interval."""
    found = []
    band = [point for point in line if point.low is not None and point.high is not None]
    if not joined:
        found += [
            f'<line x1="{at_x(one.x):.1f}" x2="{at_x(one.x):.1f}" y1="{at_y(one.low):.1f}" y2="{at_y(one.high):.1f}" '
            f'stroke="{colour}" stroke-width="2" opacity="0.4"/>'
            for one in band
        ]
    elif len(band) > 1:
        upper = [f"{at_x(one.x):.1f},{at_y(one.high):.1f}" for one in band]
        lower = [f"{at_x(one.x):.1f},{at_y(one.low):.1f}" for one in reversed(band)]
        found.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity="0.15"/>')
    if joined:
        path = " ".join(f"{at_x(one.x):.1f},{at_y(one.y):.1f}" for one in line)
        found.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    found += [f'<circle cx="{at_x(one.x):.1f}" cy="{at_y(one.y):.1f}" r="3" fill="{colour}"/>' for one in line]
    y = _TOP + 18 * number
    found.append(f'<rect x="{_RIGHT + 16}" y="{y}" width="12" height="12" fill="{colour}"/>')
    found.append(_text(_RIGHT + 34, y + 11, name))
    return found


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal", more: str = ""
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="#0f172a"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} {more}>{escape(text)}</text>'

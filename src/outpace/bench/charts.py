"""The charts of a report as data: bars with intervals, stacked bars, lines. ``templates/charts.html`` draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outpace.bench.figure_text import number, percent

PLAIN = "var(--plain)"
"""The colour of what others are compared with."""
_LOG_TICKS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
_LEAST = 0.02  # a ratio below it is drawn there
_COLOURS = 8


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour of the page's palette for every name."""
    return {name: f"var(--c{i % _COLOURS + 1})" for i, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class Scale:
    """From a figure to its place on a track: ``at`` gives per cent of the width. Bars begin at ``origin``."""

    at: Callable[[float], float]
    origin: float
    ticks: Sequence[float]
    unit: str = ""


def ratio_scale(values: Sequence[float]) -> Scale:
    """Logarithmic, around 1."""
    low, high = math.log(max(min(1.0, *values), _LEAST) * 0.94), math.log(max(1.25, *values) * 1.06)
    ticks = [1.0]
    for tick in sorted(_LOG_TICKS, key=lambda each: abs(math.log(each))):  # outwards from 1, where there is room
        apart = min(abs(math.log(tick / other)) for other in ticks)
        if low < math.log(tick) < high and apart > 0.14 * (high - low):
            ticks.append(tick)
    return Scale(lambda value: 100 * (math.log(max(value, _LEAST)) - low) / (high - low), 1.0, ticks, "x")


def linear_scale(values: Sequence[float]) -> Scale:
    """From 0 to a little more than the largest value."""
    high = 1.02 * max(values)
    return Scale(lambda value: 100 * value / high, 0.0, [level for level in levels(high) if level <= high])


def levels(highest: float) -> list[float]:
    """Round figures from 0 up to ``highest`` or the next one above, four to six of them."""
    raw = highest / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw * 0.999)
    return [round(step * i, 12) for i in range(math.ceil(highest / step - 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a bar chart. ``dots`` are (what, value); ``shown`` and ``interval`` are the figures as text."""

    name: str
    colour: str
    value: float
    ci95: Sequence[float] | None
    shown: str
    interval: str
    dots: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True)
class BarChart:
    """Blocks of bars on one scale: (heading, bars). ``wide``: names are long."""

    title: str
    lead: str
    blocks: Sequence[tuple[str, Sequence[Bar]]]
    scale: Scale
    wide: bool = False
    kind = "bars"


@dataclass(frozen=True, slots=True)
class Stack:
    """One stacked bar: (part, size in per cent of the longest bar's length, colour, tooltip)."""

    name: str
    shown: str
    parts: Sequence[tuple[str, float, str, str]]


@dataclass(frozen=True, slots=True)
class StackChart:
    """Stacked bars with a legend of (part, colour)."""

    title: str
    lead: str
    legend: Mapping[str, str]
    bars: Sequence[Stack]
    kind = "stacks"


@dataclass(frozen=True, slots=True)
class LineChart:
    """Shares by position, one line a name; drawn on a canvas of WIDTH x HEIGHT units."""

    title: str
    lead: str
    axis: str
    series: Mapping[str, Sequence[float]]
    colours: Mapping[str, str]
    kind = "lines"
    width, height = 560, 280
    left, right, top, bottom = 56, 548, 10, 240

    @property
    def depth(self) -> int:
        """The last position that is drawn: beyond it all lie below half a per cent."""
        drawn = [i + 1 for line in self.series.values() for i, share in enumerate(line) if share >= 0.005]
        return max(drawn, default=0)

    @property
    def levels(self) -> list[float]:
        """Shares at which a grid line is drawn."""
        return levels(max(max(line) for line in self.series.values()))

    @property
    def positions(self) -> range:
        """Positions that are labelled, at most twelve."""
        return range(1, self.depth + 1, max(1, math.ceil(self.depth / 12)))

    def x(self, position: float) -> float:
        return self.left + (self.right - self.left) * (position - 1) / max(1, self.depth - 1)

    def y(self, share: float) -> float:
        return self.bottom - (self.bottom - self.top) * share / self.levels[-1]

    def points(self, name: str) -> list[tuple[float, float, str]]:
        """(x, y, tooltip) of one line."""
        line = self.series[name][: self.depth]
        return [
            (self.x(i), self.y(share), f"{name}, position {i}: {percent(share)}") for i, share in enumerate(line, 1)
        ]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a scatter chart. ``label`` stands beside it; ``told`` is its tooltip. ``marked``: drawn filled."""

    x: float
    y: float
    label: str
    told: str
    x_ci95: Sequence[float] | None = None
    y_ci95: Sequence[float] | None = None
    marked: bool = True


@dataclass(frozen=True, slots=True)
class ScatterChart:
    """Points by two figures, a line through those of one series; drawn on a canvas of WIDTH x HEIGHT units."""

    title: str
    lead: str
    x_axis: str
    y_axis: str
    series: Mapping[str, Sequence[Point]]
    colours: Mapping[str, str]
    kind = "scatter"
    width, height = 980, 420
    left, right, top, bottom = 60, 960, 14, 366

    @property
    def x_ticks(self) -> list[float]:
        return ticks([value for point in self._points for value in (0.0, point.x, *(point.x_ci95 or ()))])

    @property
    def y_ticks(self) -> list[float]:
        return ticks([value for point in self._points for value in (1.0, point.y, *(point.y_ci95 or ()))])

    @property
    def _points(self) -> list[Point]:
        return [point for points in self.series.values() for point in points]

    def x(self, value: float) -> float:
        return _placed(value, self.x_ticks, self.left, self.right)

    def y(self, value: float) -> float:
        return _placed(value, self.y_ticks, self.bottom, self.top)


def ticks(values: Sequence[float]) -> list[float]:
    """Round figures at equal steps that enclose all ``values``, four to eight of them."""
    low, high = min(values), max(values)
    step = levels((high - low) or 1.0)[1]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, max(last, first + 1) + 1)]


def _placed(value: float, marks: Sequence[float], begin: float, end: float) -> float:
    return begin + (end - begin) * (value - marks[0]) / (marks[-1] - marks[0])


Chart = BarChart | StackChart | LineChart | ScatterChart


def stacked(rows: Mapping[str, Mapping[str, float]], palette: Mapping[str, str], unit: str) -> list[Stack]:
    """Stacked bars on one scale from parts in ``unit``, the longest as wide as the chart."""
    longest = max(sum(parts.values()) for parts in rows.values())
    return [
        Stack(
            name,
            f"{number(sum(parts.values()))} {unit}",
            [
                (part, 100 * size / longest, palette[part], f"{name}, {part}: {number(size, 2)} {unit}")
                for part, size in parts.items()
            ],
        )
        for name, parts in rows.items()
    ]

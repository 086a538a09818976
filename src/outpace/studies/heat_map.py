"""A map of figures as SVG: rows and columns of cells, blue above 1 and red below."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from html import escape
from typing import Any

_CELL_WIDTH, _CELL_HEIGHT, _TOP = 56, 22, 64
_LETTER = 6.6
"""Width of a letter, about."""
_FULL = 2.0
"""The figure at which a cell has its full colour; half of 1 is that of its inverse."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """``cells[row][column]``: a ratio, None where there is none."""

    title: str
    x_axis: str
    columns: Seq[str]
    rows: Seq[str]
    cells: Seq[Seq[float | None]]

    def public(self) -> dict[str, Any]:
        cells = [list(row) for row in self.cells]
        return {
            "title": self.title,
            "x_axis": self.x_axis,
            "columns": list(self.columns),
            "rows": list(self.rows),
            "cells": cells,
        }

    def svg(self) -> str:
        """The map. Text in it is escaped."""
        left = 24 + round(_LETTER * max(map(len, self.rows), default=0))
        width = left + _CELL_WIDTH * len(self.columns) + 12
        height = _TOP + _CELL_HEIGHT * len(self.rows) + 12
        parts = [_text(12, 22, self.title, size=15, anchor="start")]
        parts.append(_text(left, 42, self.x_axis, anchor="start"))
        for at, name in enumerate(self.columns):
            parts.append(_text(left + _CELL_WIDTH * (at + 0.5), 58, name))
        for down, (name, row) in enumerate(zip(self.rows, self.cells, strict=True)):
            y = _TOP + _CELL_HEIGHT * down
            parts.append(_text(left - 8, y + 15, name, anchor="end"))
            for across, value in enumerate(row):
                x = left + _CELL_WIDTH * across
                size = f'width="{_CELL_WIDTH - 1}" height="{_CELL_HEIGHT - 1}"'
                parts.append(f'<rect x="{x}" y="{y}" {size} fill="{_colour(value)}"/>')
                parts.append(_text(x + _CELL_WIDTH / 2, y + 15, "–" if value is None else f"{value:.2f}"))
        body = "\n".join(parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'role="img" aria-label="{escape(self.title)}">\n'
            f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
        )


def _colour(value: float | None) -> str:
    if value is None:
        return "#f1f5f9"
    above = value >= 1.0
    ratio = value if above else 1.0 / max(value, 1e-3)
    pale = round(255 - 150 * min(1.0, (ratio - 1.0) / (_FULL - 1.0)))
    return f"rgb({pale},{pale},255)" if above else f"rgb(255,{pale},{pale})"


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="#0f172a"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'

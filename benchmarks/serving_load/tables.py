"""What is printed: a line for each server under each load, and the ratios; the same as Markdown, for a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COLUMNS = (
    ("tokens/s", 18),
    ("requests/s", 11),
    ("TTFT p50", 9),
    ("p90", 8),
    ("p99", 8),
    ("ITL p50", 8),
    ("p90", 7),
    ("p99", 7),
    ("TPOT p50", 9),
    ("goodput/s", 16),
    ("cached", 7),
    ("drafted rounds", 15),
    ("requests", 9),
    ("errors", 7),
)
_MARKDOWN = (
    *("tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "p99", "goodput/s"),
    *("drafted: rounds", "requests", "errors"),
)


def headings(load: str) -> str:
    """The first line of a load's table."""
    return f"\n{load}\n{'':28}" + "".join(f"{title:>{width}}" for title, width in _COLUMNS)


def line(name: str, one: dict[str, Any]) -> str:
    """One server's figures under one load."""
    ttft, itl = (_percentiles(one[key]) for key in ("ttft_ms", "itl_ms"))
    cells = (
        _with_interval(one["tokens_per_second"]),
        f"{one['requests_per_second']['value'] or 0:.2f}",
        *ttft,
        *itl,
        _percentiles(one["tpot_ms"])[0],
        _goodput(one),
        _part(one["cached_share"]),
        *_drafted(one),
        str(sum(one["errors"].values())),
    )
    return f"{name:28}" + "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def ratio_line(name: str, one: dict[str, Any]) -> str:
    """A ratio of two servers' tokens per second."""
    if one["ratio"] is None:
        return f"  {name}: no rate"
    interval = "" if one["ci95"] is None else f" [{one['ci95'][0]:.2f}, {one['ci95'][1]:.2f}]"
    return f"  {name}: {one['ratio']:.2f}{interval} times the tokens per second"


def markdown(found: Mapping[str, Any]) -> list[str]:
    """A table for each load of a JSON object that was measured, and the ratios below it. Milliseconds."""
    lines = []
    for cell in found["cells"]:
        lines += [f"{cell['model']}, {cell['load']}:", "", _row("", *_MARKDOWN), _row(*["---"] * (1 + len(_MARKDOWN)))]
        for name, one in cell["servers"].items():
            ttft, itl, tpot = (_percentiles(one[key])[::2] for key in ("ttft_ms", "itl_ms", "tpot_ms"))
            figures = (_with_interval(one["tokens_per_second"]), *ttft, *itl, *tpot, _goodput(one), *_drafted(one))
            lines.append(_row(name, *figures, str(sum(one["errors"].values()))))
        lines += ["", *(ratio_line(f"{one['of']} / {one['to']}", one).strip() for one in cell["ratios"]), ""]
    return lines


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _goodput(one: Mapping[str, Any]) -> str:
    return f"{one['goodput']['value'] or 0:.2f} ({one['goodput']['share']:.0%})"


def _drafted(one: Mapping[str, Any]) -> tuple[str, str]:
    """The shares of the rounds and of the requests in which anything was drafted."""
    return _part(one["speculation"].get("rounds_share")), _part(one["speculation"].get("requests_share"))


def _part(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _with_interval(one: dict[str, Any]) -> str:
    if one["value"] is None:
        return "-"
    if one["ci95"] is None:
        return f"{one['value']:.1f}"
    return f"{one['value']:.1f} [{one['ci95'][0]:.0f}, {one['ci95'][1]:.0f}]"


def _percentiles(one: dict[str, Any] | None) -> tuple[str, ...]:
    if one is None:
        return "-", "-", "-"
    return tuple(f"{each['value']:.0f}" for each in one.values())

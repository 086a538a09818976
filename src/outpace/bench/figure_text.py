"""How reports write figures: numbers, shares, ratios and intervals as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

UNDEFINED = "–"


def number(value: float | None, digits: int = 1) -> str:
    """A figure with ``digits`` decimals (none from 1000 on), or a dash where it is undefined."""
    return UNDEFINED if value is None else f"{value:,.{digits if abs(value) < 1000 else 0}f}"


def percent(value: float | None) -> str:
    """A share between 0 and 1 in per cent, or a dash where it is undefined."""
    return UNDEFINED if value is None else f"{100 * value:.0f} %"


def times(value: float | None) -> str:
    """A ratio: 1.42x, or a dash where it is undefined."""
    return UNDEFINED if value is None else f"{value:.2f}x"


def bounds(ci95: Sequence[float] | None, digits: int = 2) -> str:
    """An interval: [1.31, 1.55]; nothing where there is none."""
    return f"[{ci95[0]:.{digits}f}, {ci95[1]:.{digits}f}]" if ci95 else ""


def span(ci95: Sequence[float] | None, digits: int = 2) -> str:
    """The same interval in a table's column: 1.31–1.55; nothing where there is none."""
    return f"{ci95[0]:.{digits}f}–{ci95[1]:.{digits}f}" if ci95 else ""


def parts(shares: Mapping[str, float | None]) -> str:
    """eagle3 71 % + sam 12 %: the share of rounds in which each part of a method drafted; a dash without parts."""
    return " + ".join(f"{name} {percent(share)}" for name, share in shares.items()) or UNDEFINED


def threads(machine: Mapping[str, Any]) -> str:
    """2 threads; 1 thread."""
    count = machine.get("threads")
    return f"{count} thread" + ("" if count == 1 else "s")


def split(shares: Mapping[str, float | None]) -> str:
    """3/91/2/4: shares of the decoding time in per cent; a dash where they are undefined."""
    known = [share for share in shares.values() if share is not None]
    return "/".join(f"{100 * share:.0f}" for share in known) if len(known) == len(shares) else UNDEFINED

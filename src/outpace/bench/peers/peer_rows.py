"""From answers to the JSON object: a row for every library and configuration, and how outpace compares with the others.

Rates, waits and intervals are those of :mod:`outpace.core.metrics` and :mod:`outpace.bench.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outpace.bench.columns import row_of
from outpace.bench.peers.entries import Entry, Question
from outpace.bench.peers.peer_columns import COLUMNS, Answered
from outpace.bench.statistics import Rate, speedup, speedup_interval

Measure = Callable[[Entry, Sequence[str]], list[Rate]]

PLAIN = {"none", "plain"}
"""Configurations that do not speculate."""


def compared(entries: Sequence[Entry], questions: Sequence[Question]) -> dict[str, Any]:
    """The rows and the three ratios. A row that failed is shown, and is not compared."""
    ids = [question.id for question in questions if any(question.id in entry.answers for entry in entries)]
    groups: dict[str, list[str]] = {}
    for question in questions:
        if question.id in ids:
            groups.setdefault(question.category, []).append(question.id)
    reference = next((one for one in entries if one.ours and one.config == "none" and not one.error), None)
    rows = {entry: row_of(COLUMNS, Answered(entry, ids, groups, reference)) for entry in entries}
    mine = [entry for entry in entries if entry.ours and not entry.error and entry.answers]
    theirs = [entry for entry in entries if not entry.ours and not entry.error and entry.answers]
    best = _fastest(mine, ids)
    bare = [[entry for entry in side if entry.config in PLAIN] for side in (mine, theirs)]
    return {
        "peers": [row for entry, row in rows.items() if not entry.ours],
        "ours": [row for entry, row in rows.items() if entry.ours],
        "ratio_to_best_peer": _against(best, theirs, ids, groups, _rates, _fastest),
        "plain_ratio": _against(_fastest(bare[0], ids), bare[1], ids, groups, _rates, _fastest),
        "ttft_ratio": _against(best, theirs, ids, groups, _waits, _soonest),
        "reference": reference.label if reference else None,
    }


def _against(
    mine: Entry | None,
    theirs: Sequence[Entry],
    ids: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    measure: Measure,
    pick: Callable[[Sequence[Entry], Sequence[str]], Entry | None],
) -> dict[str, Any]:
    """One row of ours over the best peer of all prompts, and over the best peer of each category."""

    def over(peer: Entry | None, chosen: Sequence[str]) -> tuple[float | None, list[float] | None]:
        if mine is None or peer is None:
            return None, None
        pair = measure(mine, chosen), measure(peer, chosen)
        bounds = speedup_interval(*pair, seed=0)
        return speedup(*pair), list(bounds) if bounds else None

    best = pick(theirs, ids)
    overall, bounds = over(best, ids)
    cells = {}
    for name, chosen in groups.items() if overall is not None else ():
        there = pick(theirs, chosen)
        share, around = over(there, chosen)
        cells[name] = {"ratio": share, "ci95": around, "peer": there.label if there else None}
    return {
        "overall": overall,
        "ci95": bounds,
        "by_category": cells,
        "ours": mine.label if mine else None,
        "peer": best.label if best else None,
    }


def _rates(entry: Entry, ids: Sequence[str]) -> list[Rate]:
    return entry.rates(ids)


def _waits(entry: Entry, ids: Sequence[str]) -> list[Rate]:
    """As (milliseconds, 1): the ratio of two such is that of the means."""
    return [(entry.answers[one].ttft_ms, 1.0) for one in ids if one in entry.answers]


def _fastest(entries: Sequence[Entry], ids: Sequence[str]) -> Entry | None:
    rates = {entry: rate for entry in entries if (rate := entry.decode_rate(ids)) is not None}
    return max(rates, key=lambda entry: rates[entry], default=None)


def _soonest(entries: Sequence[Entry], ids: Sequence[str]) -> Entry | None:
    return min(entries, key=lambda entry: sum(wait for wait, _ in _waits(entry, ids)), default=None)

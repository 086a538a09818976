"""From answers to the JSON object: a row for every library and configuration, and how outpace compares with the others.

The figures of a row are declared once each, as :mod:`outpace.bench.columns` does for methods. Rates, waits and
intervals are those of :mod:`outpace.core.metrics` and :mod:`outpace.bench.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from outpace.bench.columns import Column, row_of
from outpace.bench.figure_text import UNDEFINED, number, percent, span
from outpace.bench.peers.entries import Answer, Entry, Question
from outpace.bench.report import Cell, Row
from outpace.bench.statistics import Rate, speedup, speedup_interval
from outpace.core.metrics import ratio

PLAIN = {"none", "plain"}
"""Configurations that do not speculate."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What a row's columns are read from: ``ids`` of prompts, ``groups`` of them by task, the row to compare with."""

    entry: Entry
    ids: Sequence[str]
    groups: Mapping[str, Sequence[str]]
    reference: Entry | None

    @property
    def answers(self) -> list[Answer]:
        return [self.entry.answers[one] for one in self.ids if one in self.entry.answers]

    @property
    def agreement(self) -> dict[str, Any] | None:
        """Prompts with identical answers, prompts compared, and the mean share before the first difference."""
        if self.reference is None or self.entry is self.reference:
            return None
        ours, theirs = self.entry.answers, self.reference.answers
        pairs = [(ours[one].tokens, theirs[one].tokens) for one in self.ids if one in ours and one in theirs]
        shares = [
            sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False))) / len(pair[1])
            for pair in pairs
        ]
        same = sum(one == other for one, other in pairs)
        return {"same": same, "of": len(pairs), "prefix": ratio(sum(shares), len(shares))}


def _interval(entry: Entry, ids: Sequence[str]) -> tuple[float, float] | None:
    """Bootstrap over prompts, of one rate: its ratio to one token a second."""
    rates = tuple(entry.rates(ids))
    return _speedup_interval(rates, ((1.0, 1.0),) * len(rates))


@lru_cache(maxsize=4096)
def _speedup_interval(rates: tuple[Rate, ...], base: tuple[Rate, ...]) -> tuple[float, float] | None:
    """Remembered: results are computed after every row, and most intervals are then those of the last time."""
    return speedup_interval(rates, base)


def _by_task(read: Callable[[Entry, Sequence[str]], Any]) -> Callable[[Answered], dict[str, Any]]:
    return lambda one: {name: read(one.entry, chosen) for name, chosen in one.groups.items()}


def _figures(answer: Answer) -> dict[str, float | None]:
    """Of one answer, what the figures are made of."""
    return {"tokens": len(answer.tokens), "first": answer.first, "seconds": answer.seconds, "ttft_ms": answer.ttft_ms}


def _agreement(row: Row) -> str:
    """5/14, 62 %."""
    found = row["agreement"]
    return f"{found['same']}/{found['of']}, {percent(found['prefix'])}" if found and found["of"] else UNDEFINED


COLUMNS: tuple[Column[Answered], ...] = (
    Column(
        key="name",
        measure=lambda one: one.entry.name,
        title="library",
        cell=lambda row: Cell(row["name"], "strong" if row["name"] == "outpace" else ""),
        left=True,
    ),
    Column(
        key="config",
        measure=lambda one: one.entry.config,
        title="configuration",
        cell=lambda row: Cell(row["config"], detail=row["weights"] or ""),
        left=True,
    ),
    Column(
        key="version",
        measure=lambda one: one.entry.version,
        title="version",
        cell=lambda row: row["version"] or UNDEFINED,
        left=True,
        terminal=False,
    ),
    Column(
        key="precision",
        measure=lambda one: one.entry.precision,
        title="precision",
        cell=lambda row: row["precision"] or UNDEFINED,
        left=True,
        definition="In what the weights are kept, and in what is computed where the library says so. Libraries that "
        "read the GGUF file keep its weights as they are, except in rows that name another format; bfloat16 takes more "
        "memory and time.",
    ),
    Column(
        key="decode_tokens_per_second",
        measure=lambda one: one.entry.decode_rate(one.ids),
        title="tok/s",
        cell=lambda row: Cell("failed", "bad") if row["error"] else number(row["decode_tokens_per_second"]),
        definition="Decode rate: tokens after those that arrive first, over the time after these; all prompts.",
    ),
    Column(
        key="ci95",
        measure=lambda one: _interval(one.entry, one.ids),
        title="95 %",
        cell=lambda row: Cell("" if row["error"] else span(row["ci95"], 1), "dim"),
        definition="The decode rate's 95 % interval: bootstrap over prompts.",
    ),
    Column(
        key="ttft_ms",
        measure=lambda one: ratio(sum(answer.ttft_ms for answer in one.answers), len(one.answers)),
        title="TTFT ms",
        cell=lambda row: number(row["ttft_ms"], 0),
        definition="Milliseconds from the call to the first token that the library hands out, prefill included; mean "
        "over prompts.",
    ),
    Column(key="by_category", measure=_by_task(Entry.decode_rate)),
    Column(key="error", measure=lambda one: one.entry.error),
    Column(key="weights", measure=lambda one: one.entry.weights),
    Column(key="note", measure=lambda one: one.entry.note),
    Column(key="by_category_ci95", measure=_by_task(_interval)),
    Column(key="prompts", measure=lambda one: len(one.answers)),
    Column(key="tokens", measure=lambda one: sum(len(answer.tokens) for answer in one.answers)),
    Column(
        key="memory_mb",
        measure=lambda one: max((answer.memory_mb for answer in one.answers if answer.memory_mb), default=None),
        title="MB",
        cell=lambda row: number(row["memory_mb"], 0),
        definition="The largest resident memory of the library's process while it answered. Weights in a mapped file "
        "count.",
    ),
    Column(
        key="agreement",
        measure=lambda one: one.agreement,
        title="identical",
        cell=_agreement,
        legend="answers identical to outpace's autoregressive decoding, and the share before the first difference",
        definition="Answers that are those of outpace's autoregressive decoding, token by token, and how much of an "
        "answer agrees before the first difference. Other kernels and precisions round differently, so that a "
        "difference is no error.",
    ),
    Column(key="answers", measure=lambda one: {name: _figures(answer) for name, answer in one.entry.answers.items()}),
)


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
        "ratio_to_best_peer": _against(best, theirs, ids, groups, Entry.rates, _fastest),
        "plain_ratio": _against(_fastest(bare[0], ids), bare[1], ids, groups, Entry.rates, _fastest),
        "ttft_ratio": _against(best, theirs, ids, groups, _waits, _soonest),
        "reference": reference.label if reference else None,
    }


def _against(
    mine: Entry | None,
    theirs: Sequence[Entry],
    ids: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    measure: Callable[[Entry, Sequence[str]], list[Rate]],
    pick: Callable[[Sequence[Entry], Sequence[str]], Entry | None],
) -> dict[str, Any]:
    """One row of ours over the best peer of all prompts, and over the best peer of each category."""

    def over(peer: Entry | None, chosen: Sequence[str]) -> tuple[float | None, tuple[float, float] | None]:
        if mine is None or peer is None:
            return None, None
        pair = tuple(measure(mine, chosen)), tuple(measure(peer, chosen))
        return speedup(*pair), _speedup_interval(*pair)

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


def _waits(entry: Entry, ids: Sequence[str]) -> list[Rate]:
    """As (milliseconds, 1): the ratio of two such is that of the means."""
    return [(entry.answers[one].ttft_ms, 1.0) for one in ids if one in entry.answers]


def _fastest(entries: Sequence[Entry], ids: Sequence[str]) -> Entry | None:
    rates = {entry: rate for entry in entries if (rate := entry.decode_rate(ids)) is not None}
    return max(rates, key=lambda entry: rates[entry], default=None)


def _soonest(entries: Sequence[Entry], ids: Sequence[str]) -> Entry | None:
    return min(entries, key=lambda entry: sum(wait for wait, _ in _waits(entry, ids)), default=None)

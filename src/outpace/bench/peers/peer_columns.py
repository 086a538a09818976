"""The figures of a comparison's row, each declared once; as :mod:`outpace.bench.columns` does for methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from outpace.bench.columns import Column
from outpace.bench.figure_text import UNDEFINED, number, percent, span
from outpace.bench.peers.entries import Answer, Entry
from outpace.bench.report import Cell, Row
from outpace.bench.statistics import speedup_interval
from outpace.core.metrics import ratio


@dataclass(frozen=True, slots=True)
class Answered:
    """One library in one configuration, on these prompts; what a row's columns are read from.

    ``ids`` of prompts, ``groups`` of them by task; ``reference``: the row that answers are compared with.
    """

    entry: Entry
    ids: Sequence[str]
    groups: Mapping[str, Sequence[str]]
    reference: Entry | None

    @property
    def answers(self) -> list[Answer]:
        """What it answered."""
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


def _interval(entry: Entry, ids: Sequence[str]) -> list[float] | None:
    """Bootstrap over prompts, of one rate: its ratio to one token a second."""
    rates = entry.rates(ids)
    bounds = speedup_interval(rates, [(1.0, 1.0)] * len(rates), seed=0)
    return list(bounds) if bounds else None


def _by_task(read: Callable[[Entry, Sequence[str]], Any]) -> Callable[[Answered], dict[str, Any]]:
    return lambda one: {name: read(one.entry, chosen) for name, chosen in one.groups.items()}


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
        cell=lambda row: row["config"],
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
        "read the GGUF file keep its weights as they are; bfloat16 takes more memory and time.",
    ),
    Column(
        key="decode_tokens_per_second",
        measure=lambda one: one.entry.decode_rate(one.ids),
        title="tok/s",
        cell=lambda row: Cell("failed", "bad") if row["error"] else number(row["decode_tokens_per_second"]),
        definition="Decode rate: tokens after the first, over the time after the first, all prompts together.",
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
        legend="answers that are those of outpace's autoregressive decoding, and the share before the first difference",
        definition="Answers that are those of outpace's autoregressive decoding, token by token, and how much of an "
        "answer agrees before the first difference. Other kernels and precisions round differently, so that a "
        "difference is no error.",
    ),
)

"""From records to the rows of the result: the figures of metrics.py, the speed-up, the identity check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.bench.differences import Difference
from outpace.bench.records import Record
from outpace.bench.statistics import repeated_ngrams, speedup, speedup_interval
from outpace.core.metrics import ratio, total
from outpace.engine.method import Method


@dataclass(slots=True)
class Lane:
    """One method in the bench: what it did on every prompt so far, by the prompt's id."""

    label: str
    method: Method
    records: dict[str, Record] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    error: str | None = None

    def namespace(self, name: str) -> str:
        """Its own part of the bench's namespace, so that no method learns from another; none without one."""
        return name and f"{name}/{self.label}"

    def describe(self, plain: Lane, *, compared: bool, seed: int) -> dict[str, Any]:
        """The method's row, ``by_category`` included. ``compared``: whether outputs were held against plain's."""
        categories = dict.fromkeys(record.category for record in plain.records.values())
        row = self._figures(list(self.records.values()), plain, compared, seed)
        row["by_category"] = {
            category: self._figures(chosen, plain, compared, seed)
            for category in categories
            if (chosen := [record for record in self.records.values() if record.category == category])
        }
        row["differences"] = [difference.public() for difference in self.differences.values()]
        return row

    def _figures(self, records: Sequence[Record], plain: Lane, compared: bool, seed: int) -> dict[str, Any]:
        figures = total(record.metrics for record in records).figures()
        waits = [answer.ttft for record in records for answer in record.answers if answer.tokens]
        pairs = [(record, plain.records[record.prompt]) for record in records if record.prompt in plain.records]
        ours, theirs = [ours.decode_rate for ours, _ in pairs], [theirs.decode_rate for _, theirs in pairs]
        interval = speedup_interval(ours, theirs, seed=seed)
        repeats = [repeated_ngrams(answer.tokens) for record in records for answer in record.answers]
        return {
            "method": self.label,
            "lossless": self.method.lossless,
            "prompts": len(records),
            "tokens": figures["tokens"],
            "seconds": figures["seconds"],
            "tokens_per_second": figures["tokens_per_second"],
            "decode_tokens_per_second": figures["decode_tokens_per_second"],
            "ttft_ms": ratio(1e3 * sum(waits), len(waits)),
            "speedup": speedup(ours, theirs),
            "speedup_ci95": list(interval) if interval else None,
            "mean_acceptance_length": figures["mean_acceptance_length"],
            "acceptance_rate": figures["acceptance_rate"],
            "per_position_acceptance": figures["per_position_acceptance"],
            "identical": self._identical([ours.prompt for ours, _ in pairs]) if compared else None,
            "time_split": figures["time_split"],
            "peak_memory_mb": max((record.peak_memory_mb for record in records), default=None),
            "error": self.error,
            "family": self.method.family or None,
            "repeated_ngrams": ratio(sum(seen for seen, _ in repeats), sum(count for _, count in repeats)),
            "drafting_rounds": figures["drafting_rounds"],
            "drafting_acceptance_length": figures["drafting_acceptance_length"],
            "draft_ms": figures["draft_ms"],
            "drafting_parts": figures["drafting_parts"],
            "caches": figures["caches"],
        }

    def _identical(self, prompts: Sequence[str]) -> dict[str, int]:
        found = [self.differences[prompt] for prompt in prompts if prompt in self.differences]
        return {
            "same": len(prompts) - len(found),
            "of": len(prompts),
            "near_ties": sum(difference.near_tie for difference in found),
        }


def per_prompt(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """Every prompt with each method's tokens, decode rate and speed-up."""
    plain = lanes[0].records
    entries = []
    for name in dict.fromkeys(name for lane in lanes for name in lane.records):
        records = {lane.label: lane.records[name] for lane in lanes if name in lane.records}
        entries.append(
            {
                "id": name,
                "category": next(iter(records.values())).category,
                "tokens": {label: record.metrics.tokens for label, record in records.items()},
                "decode_tokens_per_second": {label: ratio(*record.decode_rate) for label, record in records.items()},
                "speedup": {
                    label: speedup([record.decode_rate], [plain[name].decode_rate]) if name in plain else None
                    for label, record in records.items()
                },
            }
        )
    return entries


def plain_figures(value: Any) -> Any:
    """``value`` as JSON may hold it: numbers, text, lists and objects; anything else as text."""
    if isinstance(value, Mapping):
        return {str(key): plain_figures(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_figures(item) for item in value]
    if isinstance(value, float):
        return value if value - value == 0 else None  # neither NaN nor infinite
    return value if value is None or isinstance(value, bool | int | str) else str(value)

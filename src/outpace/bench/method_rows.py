"""A bench's rows for the JSON object: the columns of every method, over all prompts, by task and by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.bench.columns import COLUMNS, row_of
from outpace.bench.method_records import Measured, MethodRecords
from outpace.bench.statistics import speedup
from outpace.core.metrics import ratio


def method_row(of: MethodRecords, autoregressive: MethodRecords, *, compared: bool, seed: int) -> dict[str, Any]:
    """One method's row, with ``by_category`` and ``differences``.

    ``compared``: whether answers were compared with those of autoregressive decoding.
    """
    records = list(of.records.values())
    row = row_of(COLUMNS, Measured(of, records, autoregressive, compared, seed))
    row["by_category"] = {
        category: row_of(COLUMNS, Measured(of, chosen, autoregressive, compared, seed))
        for category in dict.fromkeys(record.category for record in autoregressive.records.values())
        if (chosen := [record for record in records if record.category == category])
    }
    row["differences"] = [difference.public() for difference in of.differences.values()]
    return row


def prompt_rows(methods: Sequence[MethodRecords]) -> list[dict[str, Any]]:
    """Every prompt with each method's tokens, decode rate and speed-up. The first method is the reference."""
    reference = methods[0].records
    entries = []
    for name in dict.fromkeys(name for one in methods for name in one.records):
        records = {one.label: one.records[name] for one in methods if name in one.records}
        entries.append(
            {
                "id": name,
                "category": next(iter(records.values())).category,
                "tokens": {label: record.metrics.tokens for label, record in records.items()},
                "decode_tokens_per_second": {label: ratio(*record.decode_rate) for label, record in records.items()},
                "speedup": {
                    label: speedup([record.decode_rate], [reference[name].decode_rate]) if name in reference else None
                    for label, record in records.items()
                },
            }
        )
    return entries

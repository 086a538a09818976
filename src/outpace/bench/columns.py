"""The figures of a bench's row. Each is declared once, here: how it is measured, and how and where it is shown.

A new figure is one entry of ``COLUMNS``, whose order is that of the JSON object's keys and of the tables' columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

from outpace.bench.figure_text import UNDEFINED, number, parts, percent, span, split, times
from outpace.bench.method_records import Measured, MethodRecords
from outpace.bench.report import Cell, Heading, Row, Table, gain
from outpace.bench.statistics import speedup, speedup_interval
from outpace.core.metrics import ratio
from outpace.methods import bindings

Source = TypeVar("Source")


@dataclass(frozen=True, kw_only=True)
class Column(Heading, Generic[Source]):
    """One figure of a row.

    ``key`` and ``measure``: its name and its value in the JSON object; a column without them shows other keys.
    ``cell``: what stands in ``table``, read from the JSON row; without one it is in the JSON object alone.
    """

    key: str = ""
    measure: Callable[[Source], Any] | None = None
    cell: Callable[[Row], Cell | str] | None = None
    table: Literal["figures", "drafting"] = "figures"


def row_of(columns: Sequence[Column[Source]], source: Source) -> dict[str, Any]:
    """The JSON row."""
    return {one.key: one.measure(source) for one in columns if one.measure is not None}


def table_of(title: str, columns: Sequence[Column[Any]], rows: Sequence[Row], lead: str = "") -> Table:
    """The table of those columns that have cells."""
    shown = [(one, one.cell) for one in columns if one.cell is not None]
    found = [[read(row) for _, read in shown] for row in rows]
    cells = [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in found]
    return Table(title, [one for one, _ in shown], cells, lead)


def _identical(row: Row) -> Cell:
    found = row["identical"]
    if row["error"]:
        return Cell("failed", "bad")
    if not found:
        return Cell("lossless" if row["lossless"] else "lossy")
    ties = f"≈{found['near_ties']}" if found["same"] < found["of"] else ""
    return Cell(f"{found['same']}/{found['of']}", detail=ties)


def lossy_detail(row: Row) -> str:
    """What is lossy about it, with all settings, where the label does not say so already."""
    said = row.get("lossy")
    return f"lossy: {said}" if said and said.replace(" ", "") not in row["method"].replace(" ", "") else ""


def _each_cache(row: Row, say: Callable[[Mapping[str, Any]], str]) -> str:
    return " + ".join(say(cache) for cache in row["caches"]) or UNDEFINED


def _metric(key: str, **shown: Any) -> Column[Measured]:
    """A figure that :mod:`outpace.core.metrics` defines under this name."""
    return Column(key=key, measure=lambda one: one.figures[key], **shown)


COLUMNS: tuple[Column[Measured], ...] = (
    Column(
        key="method",
        measure=lambda one: one.of.label,
        title="method",
        cell=lambda row: Cell(row["method"], "strong", detail=lossy_detail(row)),
        left=True,
    ),
    Column(key="lossless", measure=lambda one: one.of.method.lossless),
    Column(key="prompts", measure=lambda one: len(one.records)),
    _metric("tokens"),
    _metric("seconds"),
    _metric("tokens_per_second"),
    _metric(
        "decode_tokens_per_second",
        title="tok/s",
        cell=lambda row: number(row["decode_tokens_per_second"]),
        definition="Decode rate: tokens after the first round, over the time after it. In a batch, another request "
        "joins when one ends, and a round's time is split equally among its requests.",
    ),
    Column(
        key="ttft_ms",
        measure=lambda one: one.ttft_ms,
        title="TTFT ms",
        cell=lambda row: number(row["ttft_ms"], 0),
        definition="Milliseconds from the start of a request to its first token, prefill included; mean over requests.",
    ),
    Column(
        key="speedup",
        measure=lambda one: speedup(*one.pairs),
        title="speed-up",
        cell=lambda row: Cell(times(row["speedup"]), gain(row["speedup_ci95"])),
        definition="Decode rate over that of autoregressive decoding; same target, prompts and run.",
    ),
    Column(
        key="speedup_ci95",
        measure=lambda one: speedup_interval(*one.pairs, seed=one.seed),
        title="95 %",
        cell=lambda row: Cell("" if row["method"] == "none" else span(row["speedup_ci95"]), "dim"),
        definition="The speed-up's 95 % interval: paired bootstrap over prompts, or over batches of them.",
    ),
    _metric(
        "mean_acceptance_length",
        title="tok/fwd",
        cell=lambda row: number(row["mean_acceptance_length"], 2),
        definition="Mean acceptance length: tokens committed per forward of the target, bonus token included. "
        "Autoregressive decoding has 1.",
    ),
    _metric(
        "acceptance_rate",
        title="accepted",
        cell=lambda row: percent(row["acceptance_rate"]),
        definition="Acceptance rate: accepted draft tokens over drafted ones; every node of a tree counts.",
    ),
    _metric("per_position_acceptance"),
    Column(
        key="identical",
        measure=lambda one: one.identical,
        title="identical",
        cell=_identical,
        legend="prompts with the answer of autoregressive decoding (≈: near ties)",
        definition="Prompts whose answers are those of autoregressive decoding, token by token (temperature 0 only). "
        "≈ counts near ties: the first difference lies between tokens whose logits differ by no more than rounding "
        "explains.",
    ),
    _metric(
        "time_split",
        title="time split",
        cell=lambda row: split(row["time_split"]),
        legend="% of decoding time for draft/score/accept/other",
        definition="Share of the decoding time in draft/score/accept/other, in per cent. Score: the target's forward.",
    ),
    Column(
        key="peak_memory_mb",
        measure=lambda one: max((record.peak_memory_mb for record in one.records), default=None),
        title="MB",
        cell=lambda row: number(row["peak_memory_mb"], 0),
        definition="The process's largest resident memory while the method ran; models of all methods are loaded "
        "together, and in main memory the keys and values of all their batches are held.",
    ),
    Column(key="error", measure=lambda one: one.of.error),
    _metric("constraint_weighting"),
    Column(key="incomplete", measure=lambda one: one.incomplete),
    Column(key="lossy", measure=lambda one: one.of.method.lossy),
    Column(key="label", measure=lambda one: bindings.split(one.of.label)[1] or None),
    Column(key="settings", measure=lambda one: dict(one.of.settings)),
    Column(key="family", measure=lambda one: one.of.method.family or None),
    Column(
        key="repeated_ngrams",
        measure=lambda one: one.repeated_ngrams,
        title="repeats",
        cell=lambda row: percent(row["repeated_ngrams"]),
        terminal=False,
        legend="share of an answer's 4-grams (runs of four tokens) that occurred earlier in the same answer",
        definition="Share of an answer's 4-grams (runs of four tokens) that occurred earlier in the same answer. A "
        "high share means that the model loops, and loops favor methods that copy.",
    ),
    _metric(
        "drafting_rounds",
        table="drafting",
        title="rounds",
        cell=lambda row: percent(row["drafting_rounds"]),
        legend="share with a draft",
        definition="Share of the rounds in which anything was drafted.",
    ),
    _metric(
        "drafting_acceptance_length",
        table="drafting",
        title="tok/round",
        cell=lambda row: number(row["drafting_acceptance_length"], 2),
        legend="tokens committed in a round with a draft",
        definition="Tokens committed per round in which anything was drafted.",
    ),
    _metric(
        "draft_ms",
        table="drafting",
        title="draft ms",
        cell=lambda row: number(row["draft_ms"], 2),
        legend="per round",
        definition="Milliseconds of drafting (propose and observe) per round, rounds without a draft included.",
    ),
    _metric(
        "drafting_parts",
        table="drafting",
        title="parts",
        cell=lambda row: parts(row["drafting_parts"]),
        legend="share of rounds in which each part drafted",
        definition="Share of the rounds in which each part drafted, of methods that choose among parts.",
    ),
    Column(
        table="drafting",
        title="caches",
        cell=lambda row: _each_cache(row, lambda cache: str(cache["name"])),
        terminal=False,
    ),
    _metric(
        "caches",
        table="drafting",
        title="cached",
        cell=lambda row: _each_cache(
            row, lambda cache: f"{number(cache['entries'], 0)} of {number(cache['bound'], 0)}"
        ),
        legend="cache entries and their limit",
        definition="Entries of the method's caches when the last request ended, and their bound.",
    ),
    Column(
        table="drafting",
        title="evicted",
        cell=lambda row: _each_cache(row, lambda cache: number(cache["evicted"], 0)),
        definition="Entries evicted from a full cache, least recently used first.",
    ),
)


def method_row(of: MethodRecords, autoregressive: MethodRecords, *, compared: bool, seed: int) -> dict[str, Any]:
    """One method's row, with ``by_category``, ``failed`` prompts, and ``differences`` where answers were compared."""
    records = list(of.records.values())
    row = row_of(COLUMNS, Measured(of, records, autoregressive, compared, seed))
    row["by_category"] = {
        category: row_of(COLUMNS, Measured(of, chosen, autoregressive, compared, seed))
        for category in dict.fromkeys(record.category for record in autoregressive.records.values())
        if (chosen := [record for record in records if record.category == category])
    }
    row["differences"] = [asdict(difference) for difference in of.differences.values()]
    row["failed"] = [{"prompt": prompt, "error": error} for prompt, error in of.failed.items()]
    if of.failed and not records and row["error"] is None:
        row["error"] = f"every prompt failed: {next(iter(of.failed.values()))}"
    return row


def prompt_rows(methods: Sequence[MethodRecords]) -> list[dict[str, Any]]:
    """Every prompt with each method's tokens, decode rate and speed-up. The first method is the reference."""
    reference = methods[0].records
    entries: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for one in methods for name in one.records):
        records = {one.label: one.records[name] for one in methods if name in one.records}
        entries.append(
            {
                "id": name,
                "category": next(iter(records.values())).category,
                "tokens": {label: record.metrics.tokens for label, record in records.items()},
                "rounds": {label: record.metrics.rounds for label, record in records.items()},
                "committed": {label: record.metrics.committed for label, record in records.items()},
                "decode_seconds": {label: record.decode_rate[1] for label, record in records.items()},
                "decode_tokens_per_second": {label: ratio(*record.decode_rate) for label, record in records.items()},
                "speedup": {
                    label: speedup([record.decode_rate], [reference[name].decode_rate]) if name in reference else None
                    for label, record in records.items()
                },
            }
        )
        if any(name in one.quality for one in methods):
            entries[-1]["quality"] = {one.label: asdict(one.quality[name]) for one in methods if name in one.quality}
    return entries

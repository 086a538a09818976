"""``outpace bench``'s results as a report: headline, notes, tables, charts and sample answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from outpace.bench.charts import PLAIN, Bar, BarChart, Chart, LineChart, StackChart, colours, ratio_scale, stacked
from outpace.bench.columns import COLUMNS, table_of
from outpace.bench.figure_text import UNDEFINED, bounds, percent, threads, times
from outpace.bench.quality.quality_report import by_row, frontier_charts, has_quality, quality_notes, quality_table
from outpace.bench.report import Cell, Heading, Report, Row, Sample, Table, Tile, gain
from outpace.bench.results import Results
from outpace.bench.verdict import answers, verdict, wide_intervals
from outpace.core.metrics import PHASES
from outpace.core.version import __version__

_TILES = 6
_DOTS = 400
_NAMED = 3  # failed prompts that one line names
_LONG_NAME = 18  # characters that fit beside a bar
_LOOPING = 0.3  # share of repeated 4-grams from which on a note says so


class BenchReport(Results):
    """The results of a bench: ``rows`` are those of the methods, autoregressive decoding (``none``) first."""

    @classmethod
    def empty(cls) -> BenchReport:
        """That of a bench that was interrupted before it began."""
        empty: dict[str, Any] = {"version": __version__, "complete": False}
        return cls({**empty, "machine": {}, "model": {}, "settings": {}, "methods": []})

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.result["methods"]
        return found

    @property
    def failures(self) -> str:
        """In one line, which rows failed, and with which prompts; "" where none did."""
        count = sum(bool(_failure(row)) for row in self.rows)
        return f"{count} of {len(self.rows)} rows have failures: {'; '.join(failures(self.rows))}" if count else ""

    def report(self) -> Report:
        result = self.result
        settings, palette = result["settings"], {"none": PLAIN, **colours([row["method"] for row in drafted(result)])}
        model = {key: value for key, value in result["model"].items() if key != "location"}  # a report may be shared
        return Report(
            command="outpace bench",
            headline=verdict(result),
            model=result["model"].get("name", ""),
            version=result["version"],
            facts=_facts(result),
            notes=notes(result),
            tiles=_tiles(result, palette),
            tables=_tables(result),
            charts=[*(frontier_charts(result) if has_quality(result) else ()), *_speedups(result, palette)],
            small_charts=[*_time_split(result), *_positions(result, palette)],
            samples=[_sample(one) for one in result.get("samples", ())],
            about={"Machine": result["machine"], "Model": model},
            command_line=settings.get("command", ""),
            settings={key: value for key, value in settings.items() if key != "command"},
        )


def drafted(result: Mapping[str, Any]) -> list[Row]:
    """The rows of methods other than autoregressive decoding, the fastest first and failures last.

    Cards, charts and tables all have this order.
    """
    rows = [row for row in result["methods"] if row["method"] != "none"]
    return sorted(rows, key=lambda row: (bool(row["error"]), -(row["speedup"] or 0)))


def ranked(result: Mapping[str, Any]) -> list[Row]:
    """All rows: autoregressive decoding, then the others in the order of :func:`drafted`."""
    return [*(row for row in result["methods"] if row["method"] == "none"), *drafted(result)]


def categories(result: Mapping[str, Any]) -> list[str]:
    """Task groups in the order of the first row."""
    return list(result["methods"][0]["by_category"]) if result["methods"] else []


def interval(row: Row) -> str:
    """[1.31, 1.55], or nothing for a row without interval."""
    return "" if row["method"] == "none" else bounds(row["speedup_ci95"])


def failures(rows: Sequence[Row]) -> list[str]:
    """Which rows failed, and with which prompts: rows with the same failure together."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if what := _failure(row):
            found.setdefault(what, []).append(row["method"])
    return [f"{', '.join(names)} failed {what}" for what, names in found.items()]


def _failure(row: Row) -> str:
    if row["error"]:
        return f"after {row['prompts']} prompts: {row['error']}"
    if not (found := row.get("failed")):
        return ""
    names = ", ".join(f"'{one['prompt']}'" for one in found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
    total = len(found) + row["prompts"]
    return f"on {len(found)} of {total} prompts ({names}): {found[0]['error']}"


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader should know before believing the table."""
    found = [] if result["complete"] else ["Interrupted: only the prompts that every method finished are counted."]
    found += failures(result["methods"])
    for row in result["methods"]:
        same = row["identical"]
        if same and row["lossless"] and same["same"] + same["near_ties"] < same["of"]:
            wrong = same["of"] - same["same"] - same["near_ties"]
            found.append(f"{row['method']}: {wrong} different answers that are not near ties. This is a defect.")
    repeats = result["methods"][0]["repeated_ngrams"] if result["methods"] else None
    if repeats is not None and repeats > _LOOPING:
        found.append(
            f"{percent(repeats)} of the 4-grams of autoregressive decoding's answers repeat earlier ones: such "
            "repetition favours methods that copy."
        )
    found += result["settings"].get("notes", [])
    if name := result["settings"].get("namespace"):
        found.append(
            f"Namespace '{name}': each method kept what it learned from prompt to prompt, so the figures depend on "
            "the order of the prompts."
        )
    if skipped := result["settings"].get("skipped_turns"):
        found.append(f"{skipped} turns did not fit into the context and were skipped.")
    if cut := {row["method"]: row["incomplete"] for row in result["methods"] if row.get("incomplete")}:
        found.append(
            "Answers that reached the limit on new tokens before they were complete under their grammar: "
            f"{by_row(cut)}. Raise --max-new-tokens; a grammar whose texts never end is always cut."
        )
    if has_quality(result):
        found += quality_notes(result)
    if wide := wide_intervals(result):
        found.append(wide)
    return found


def _facts(result: Mapping[str, Any]) -> list[str]:
    if not result["methods"]:
        return []
    settings, machine, model = result["settings"], result["machine"], result["model"]
    counted = max(row["prompts"] for row in result["methods"])
    mode = "greedy" if not settings.get("temperature") else f"temperature {settings['temperature']:g}"
    return [
        f"{model.get('name', 'model')} {model.get('dtype') or ''}".strip().replace("torch.", ""),
        f"{counted} prompts, up to {settings.get('max_new_tokens')} tokens, {mode}, batch {settings.get('batch_size')}",
        f"{machine.get('cpu')}, {threads(machine)}",
    ]


def _tiles(result: Mapping[str, Any], palette: Mapping[str, str]) -> list[Tile]:
    best = drafted(result)[:_TILES]
    return [
        Tile(
            row["method"],
            times(row["speedup"]),
            [interval(row), "failed" if row["error"] else answers(row)],
            palette[row["method"]],
        )
        for row in best
    ]


def _tables(result: Mapping[str, Any]) -> list[Table]:
    """All figures, then those of drafting and the speed-ups by task, where anything was drafted."""
    rows, methods = ranked(result), drafted(result)
    if not rows:
        return []
    found = [table_of("All figures", [one for one in COLUMNS if one.table == "figures"], rows)]
    if methods:
        kept = result["settings"].get("namespace")
        where = f" (namespace '{kept}')" if kept else ""
        lead = f"Caches at the end of the last request{where}." if any(row["caches"] for row in methods) else ""
        columns = [one for one in COLUMNS if one.table == "drafting" or one.key == "method"]
        found.append(table_of("Drafting", columns, methods, lead))
    if has_quality(result):
        found.append(quality_table(rows))
    if methods and len(categories(result)) > 1:
        headings = [Heading(title="method", left=True), *(Heading(title=name) for name in categories(result))]
        found.append(Table("Speed-up by task", headings, [_by_task(row, result) for row in methods], page=False))
    return found


def _by_task(row: Row, result: Mapping[str, Any]) -> list[Cell]:
    cells = [row["by_category"].get(name) for name in categories(result)]
    found = [Cell(times(one["speedup"]), gain(one["speedup_ci95"])) if one else Cell(UNDEFINED) for one in cells]
    return [Cell(row["method"], "strong"), *found]


def _speedups(result: Mapping[str, Any], palette: Mapping[str, str]) -> list[Chart]:
    """Speed-up of every method, over all prompts (a dot is one prompt) and by task."""
    rows = [row for row in drafted(result) if row["speedup"]]
    if not rows:
        return []

    def bar(row: Row, dots: Sequence[tuple[str, float]] = ()) -> Bar:
        colour, ci95 = palette[row["method"]], row["speedup_ci95"]
        return Bar(row["method"], colour, row["speedup"], ci95, times(row["speedup"]), interval(row), dots)

    blocks = [("all prompts", [bar(row, _dots(result, row["method"])) for row in rows])]
    for name in categories(result) if len(categories(result)) > 1 else ():
        cells = [cell for row in rows if (cell := row["by_category"].get(name)) and cell["speedup"]]
        blocks.append((name, [bar(cell) for cell in cells]))
    drawn = [one for _, bars in blocks for one in bars]
    values = [value for one in drawn for value in (one.value, *(one.ci95 or ()), *(dot for _, dot in one.dots))]
    return [
        BarChart(
            "Speed-up by task",
            "Decode rate over that of autoregressive decoding. Bars end at the measured ratio, whiskers are 95 % "
            "intervals, each small dot is one prompt. To the right of 1x is faster. The scale is logarithmic.",
            blocks,
            ratio_scale(values),
            wide=any(len(one.name) > _LONG_NAME for one in drawn),
        )
    ]


def _dots(result: Mapping[str, Any], method: str) -> list[tuple[str, float]]:
    prompts = result["per_prompt"]
    return [(one["id"], value) for one in prompts if (value := one["speedup"].get(method))][:_DOTS]


def _time_split(result: Mapping[str, Any]) -> list[Chart]:
    """Milliseconds of decoding per token, by phase."""
    spent = {
        row["method"]: {phase: row["time_split"][phase] * 1000 / row["decode_tokens_per_second"] for phase in PHASES}
        for row in ranked(result)
        if row["decode_tokens_per_second"] and row["time_split"]["score"] is not None
    }
    palette = {phase: f"var(--{phase})" for phase in PHASES}
    lead = "Milliseconds of decoding per token. Score is the target's forward."
    return [StackChart("Where the time goes", lead, palette, stacked(spent, palette, "ms"))] if spent else []


def _positions(result: Mapping[str, Any], palette: Mapping[str, str]) -> list[Chart]:
    """Share of rounds in which the draft token at each position was accepted."""
    rows = [row for row in drafted(result) if row["per_position_acceptance"]]
    chart = LineChart(
        "Accepted by position",
        "Share of rounds in which the draft token at this position was accepted.",
        "position of the draft token",
        {row["method"]: row["per_position_acceptance"] for row in rows},
        {row["method"]: palette[row["method"]] for row in rows},
    )
    return [chart] if chart.depth else []


def _sample(one: Mapping[str, Any]) -> Sample:
    answers = dict(one["answers"])
    plain = answers.get("none")
    equal = [name for name, answer in answers.items() if name != "none" and answer == plain]
    apart = [(name, *_parted(answer, plain or "")) for name, answer in answers.items() if name not in equal]
    return Sample(one["id"], one["category"], one["prompt"], apart, equal)


def _parted(answer: str, plain: str) -> tuple[str, str]:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, plain, strict=False)))
    return answer[:same], answer[same:]

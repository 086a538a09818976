"""``outpace bench-peers``'s results as a report: headline, notes, tables, and the chart of decode rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.bench.charts import PLAIN, Bar, BarChart, Chart, colours, linear_scale
from outpace.bench.columns import table_of
from outpace.bench.figure_text import UNDEFINED, bounds, number, span, threads, times
from outpace.bench.peers.entries import Entry
from outpace.bench.peers.peer_rows import COLUMNS
from outpace.bench.report import Cell, Heading, Report, Row, Table, Tile, gain
from outpace.bench.results import Results
from outpace.core.metrics import ratio
from outpace.core.version import __version__

_OVER_THE_BEST = (
    "The fastest row of outpace's divided by the fastest row of all other libraries. By task: the same row of "
    "outpace's divided by the row that is fastest in that task. The interval is a paired bootstrap over prompts."
)


class PeersReport(Results):
    """The results of a comparison with other libraries: ``rows`` are outpace's, then those of the others."""

    @classmethod
    def empty(cls) -> PeersReport:
        """That of a comparison that was interrupted before it began."""
        empty: dict[str, Any] = {"version": __version__, "complete": False, "peers": [], "ours": []}
        empty["prompts_answered_by_all"] = 0
        return cls({**empty, "ratio_to_best_peer": None})

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [*self.result["ours"], *self.result["peers"]]

    @property
    def prompts_done(self) -> int:
        return int(self.result["prompts_answered_by_all"])

    def report(self) -> Report:
        result = self.result
        settings, machine = result["settings"], result["machine"]
        return Report(
            command="outpace bench-peers",
            headline=headline(result),
            model=result["model"].get("name", ""),
            version=result["version"],
            facts=[
                str(result["model"].get("name", "")),
                f"{settings.get('prompts')} prompts, {settings.get('max_new_tokens')} tokens each, greedy",
                f"{machine.get('cpu')}, {threads(machine)}",
            ],
            notes=notes(result),
            tiles=_tiles(result),
            tables=[table_of("All rows", COLUMNS, ranked(result)), *_by_task(result), _ratios(result)],
            charts=_rates(result),
            about={"Machine": machine, "Model": result["model"]},
            command_line=settings.get("command", ""),
            settings={key: value for key, value in settings.items() if key != "command"},
        )


def label(row: Row) -> str:
    """One name for a row, as :attr:`Entry.label`."""
    more = row["precision"] if row["name"] == "outpace" else row["weights"]
    return f"{row['name']} {row['config']}" + (f" {more}" if more else "")


def finished(entry: Entry) -> str:
    """One line about a row that is finished."""
    if entry.error is not None:
        return f"{entry.label} failed: {entry.error}"
    waits = [answer.ttft_ms for answer in entry.answers.values()]
    rate, wait = number(entry.decode_rate(entry.answers)), number(ratio(sum(waits), len(waits)), 0)
    return f"{entry.label} ({entry.precision}): {rate} tok/s, TTFT {wait} ms, {len(waits)} prompts"


def ranked(result: Mapping[str, Any]) -> list[Row]:
    """All rows, the fastest first; those that failed last."""
    found = [*result["ours"], *result["peers"]]
    return sorted(found, key=lambda row: (row["error"] is not None, -(row["decode_tokens_per_second"] or 0)))


def _categories(result: Mapping[str, Any]) -> list[str]:
    """Task groups in the order of the prompts; none where there is but one."""
    found = list(ranked(result)[0]["by_category"])
    return found if len(found) > 1 else []


def headline(result: Mapping[str, Any]) -> str:
    """The comparison in one sentence."""
    found = result["ratio_to_best_peer"]
    if found["overall"] is None:
        missing = "no other library" if found["ours"] else "no row of outpace"
        return f"Nothing to compare: {missing} could be measured."
    pace = f"{times(found['overall'])} {bounds(found['ci95'])}".rstrip()
    low, high = found["ci95"] or (0.0, float("inf"))
    if low > 1:
        verdict = f"{found['ours']} was faster than every other library"
    elif high < 1:
        verdict = f"{found['peer']} was faster than outpace"
    else:
        verdict = f"{found['ours']} and {found['peer']} were level within the noise"
    return f"{verdict}: {pace} the decode rate of {found['peer']}, the fastest of the others."


def _comparisons(result: Mapping[str, Any]) -> list[tuple[str, Row, str]]:
    """(what, the ratio, how to read it) of the three comparisons."""
    return [
        ("best against best", result["ratio_to_best_peer"], "decode rate; above 1, outpace is faster"),
        ("no speculation on either side", result["plain_ratio"], "decode rate; above 1, outpace is faster"),
        ("time to first token", result["ttft_ratio"], "waiting time; below 1, outpace is faster"),
    ]


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader should know before believing the table."""
    found = [] if result["complete"] else [_partial(result)]
    found += result["notes"]
    found += [f"{one['name']} was skipped: {one['why']}; to install: {one['install']}" for one in result["skipped"]]
    best = next((row for row in result["ours"] if label(row) == result["ratio_to_best_peer"]["ours"]), None)
    for row in (*result["ours"], *result["peers"]):
        if row["note"]:
            found.append(f"{label(row)}: {row['note']}")
        if row["error"]:
            rate = row["decode_tokens_per_second"]
            pace = f" after {row['prompts']} prompts ({number(rate)} tok/s)" if rate else ""
            found.append(f"{label(row)} failed{pace}: {row['error']}")
            if rate and best and row in result["peers"] and rate > best["decode_tokens_per_second"]:
                found.append(f"{label(row)} was faster than {label(best)} before it failed.")
    return found


def _partial(result: Mapping[str, Any]) -> str:
    by, done = result["stopped_by"], result["prompts_answered_by_all"]
    begin = f"Partial results: {by} ended the run" if by else "Partial results: the run goes on"
    if not done:
        return f"{begin}. No prompt was answered by every row; the figures are those of the first prompt."
    return f"{begin}. The figures cover the {done} of {result['settings']['prompts']} prompts that every row answered."


def _tiles(result: Mapping[str, Any]) -> list[Tile]:
    return [
        Tile(
            what,
            times(found["overall"]),
            [bounds(found["ci95"]), f"{found['ours']} over {found['peer']}", reading],
            f"var(--c{place})",
        )
        for place, (what, found, reading) in enumerate(_comparisons(result), 1)
        if found["overall"] is not None
    ]


def _by_task(result: Mapping[str, Any]) -> list[Table]:
    """Decode rates by task, the fastest of each in bold. The page has them in its chart."""
    names, measured = _categories(result), [row for row in ranked(result) if not row["error"]]
    best = {name: max((row["by_category"][name] or 0 for row in measured), default=0) for name in names}
    rows = [
        [
            Cell(label(row), "strong" if row["name"] == "outpace" else ""),
            *(Cell(number(rate := row["by_category"][name]), "strong" if rate == best[name] else "") for name in names),
        ]
        for row in measured
    ]
    headings = [Heading(left=True), *(Heading(title=name) for name in names)]
    return [Table("Tokens per second by task", headings, rows, page=False)] if names else []


def _ratios(result: Mapping[str, Any]) -> Table:
    """The three comparisons, and the best against the best of every task."""
    headings = [
        Heading(title="what", left=True),
        Heading(title="ratio", definition=_OVER_THE_BEST),
        Heading(title="95 %"),
        Heading(title="of", left=True),
    ]
    rows = []
    for what, found, reading in _comparisons(result):
        pair = f"{found['ours']} / {found['peer']}" if found["overall"] is not None else "not measured"
        waits = reading.startswith("waiting")
        rows.append([Cell(what), *_ratio(found["overall"], found["ci95"], lower_is_better=waits), Cell(pair)])
    cells = result["ratio_to_best_peer"]["by_category"]
    for name, cell in cells.items() if len(cells) > 1 else ():
        pair = f"{result['ratio_to_best_peer']['ours']} / {cell['peer'] or UNDEFINED}"
        rows.append([Cell(f"in {name}"), *_ratio(cell["ratio"], cell["ci95"]), Cell(pair)])
    return Table("outpace compared with the fastest of the others", headings, rows)


def _ratio(ratio: float | None, ci95: list[float] | None, *, lower_is_better: bool = False) -> tuple[Cell, Cell]:
    return Cell(times(ratio), gain(ci95, lower_is_better=lower_is_better)), Cell(span(ci95), "dim")


def _rates(result: Mapping[str, Any]) -> list[Chart]:
    """Every row that was measured, on one scale from 0, in the order of the table of all rows."""
    measured = [row for row in ranked(result) if not row["error"] and row["decode_tokens_per_second"]]
    if not measured:
        return []
    palette = colours([label(row) for row in measured if row["name"] == "outpace"])

    def bar(row: Row, rate: float, ci95: list[float] | None) -> Bar:
        colour = palette.get(label(row), PLAIN)
        return Bar(label(row), colour, rate, ci95, number(rate), bounds(ci95, 1))

    blocks = [("all prompts", [bar(row, row["decode_tokens_per_second"], row["ci95"]) for row in measured])]
    for name in _categories(result):
        bars = [bar(row, rate, row["by_category_ci95"][name]) for row in measured if (rate := row["by_category"][name])]
        blocks.append((name, bars))
    scale = linear_scale([value for _, bars in blocks for one in bars for value in (one.value, *(one.ci95 or ()))])
    lead = "Tokens per second after the first. Whiskers are 95 % intervals over prompts. outpace's rows have colors."
    return [BarChart("Decode rate by task", lead, blocks, scale, wide=True)]

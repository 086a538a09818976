"""``outpace advise``'s result: its words in the terminal, its table on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from outpace.bench.charts import Bar, BarChart, colours, ratio_scale
from outpace.bench.figure_text import bounds, number, threads, times
from outpace.bench.report import Cell, Heading, Report, Table, gain
from outpace.bench.results import Results, plain_figures

_HEADINGS = (
    Heading(title="method", left=True),
    Heading(title="settings", left=True),
    Heading(title="batch", definition="Requests that are decoded at once."),
    Heading(title="speed-up", definition="Expected decode rate over that of autoregressive decoding."),
    Heading(title="90 % interval", definition="Of everything that was measured: prompts, rounds, drafts."),
    Heading(title="tokens a round", definition="Expected tokens of a request in a round, its own one included."),
    Heading(title="round", definition="What such a round takes, in autoregressive rounds, its draft included."),
    Heading(title="draft", definition="Of it, what drafting takes."),
    Heading(
        title="acceptance",
        left=True,
        definition="How it was found: answers replayed, decoded once more, or scored by the draft model.",
    ),
)


class AdviceReport(Results):
    """The result of an advice; ``rows`` are the candidates, a method at a batch each."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> AdviceReport:
        return cls(plain_figures(result))

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.result["candidates"]
        return found

    def print(self, console: Console) -> None:
        """The words, and what to type."""
        first, *others = self.result["words"]
        console.print(f"[bold]{escape(first)}[/]", soft_wrap=True)
        for line in others:
            console.print(f"  {escape(line)}", soft_wrap=True)
        for note in self.result["notes"]:
            console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
        console.print()
        for engine, command in self.result["commands"].items():
            console.print(f"[bold]{escape(engine)}[/]\n  {escape(command)}", soft_wrap=True)
        console.print(
            f"\n[dim]{self.result['settings']['prompts']} prompts, {self.result['seconds']:.0f} s; the table behind "
            "it: --json, --html FILE[/]"
        )

    def report(self) -> Report:
        result = self.result
        settings, machine = result["settings"], result["machine"]
        drafting = [row for row in self.rows if row["method"] != "none"]
        palette = colours(list(dict.fromkeys(row["method"] for row in drafting)))
        blocks = [
            (f"batch {batch}", [_bar(row, palette) for row in drafting if row["batch"] == batch])
            for batch in settings["batches"]
        ]
        values = [value for row in drafting for value in (row["speedup"], *row["interval"])]
        chart = BarChart(
            "Expected speed-up",
            "Decode rate over that of autoregressive decoding; whiskers are 90 % intervals. The scale is logarithmic.",
            [one for one in blocks if one[1]],
            ratio_scale(values or [1.0]),
        )
        mode = "greedy" if not settings["temperature"] else f"temperature {settings['temperature']:g}"
        commands = [f"{engine}: {command}" for engine, command in result["commands"].items()]
        return Report(
            command="outpace advise",
            headline=" ".join(result["words"]),
            model=result["model"].get("name", ""),
            version=result["version"],
            facts=[
                str(result["model"].get("name", "model")),
                f"{settings['prompts']} prompts, up to {settings['max_new_tokens']} tokens, {mode}",
                f"{machine.get('cpu')}, {threads(machine)}",
            ],
            notes=[*result["notes"], *commands],
            tables=[Table("Candidates", _HEADINGS, [_cells(row) for row in self.rows])],
            charts=[chart] if drafting else [],
            about={
                "Machine": machine,
                "Model": {key: value for key, value in result["model"].items() if key != "location"},
            },
            settings=settings,
        )


def _bar(row: Mapping[str, Any], palette: Mapping[str, str]) -> Bar:
    return Bar(
        row["method"],
        palette[row["method"]],
        row["speedup"],
        row["interval"],
        times(row["speedup"]),
        bounds(row["interval"]),
    )


def _cells(row: Mapping[str, Any]) -> list[Cell]:
    settings = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
    return [
        Cell(row["method"], "strong"),
        Cell(settings),
        Cell(str(row["batch"])),
        Cell(times(row["speedup"]), gain(row["interval"])),
        Cell(bounds(row["interval"])),
        Cell(number(row.get("tokens_per_round"), 2)),
        Cell(number(row.get("round_steps"), 2)),
        Cell(number(row.get("draft_steps"), 3)),
        Cell(row.get("acceptance", "")),
    ]

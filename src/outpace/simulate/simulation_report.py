"""The result of a simulation: a JSON object that prints itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.bench.figure_text import number, percent, times
from outpace.bench.report import Cell, Heading, Report, Table
from outpace.bench.results import Results
from outpace.simulate.simulation import Outcome

_HEADINGS = (
    Heading(title="method", left=True),
    Heading(title="tok/s", definition="Tokens of all answers, over the time until the last one."),
    Heading(
        title="tok/s a user", definition="Tokens after the first over the time after it, both summed over the requests."
    ),
    Heading(title="speed-up", definition="Of a user's tokens per second over autoregressive decoding's."),
    Heading(title="accepted length", definition="Tokens that a request commits in a round, the target's own included."),
    Heading(title="TTFT p50", definition="Milliseconds from a request's arrival to its first token, the median."),
    Heading(title="p99", definition="The same of 99 in 100 requests at most."),
    Heading(title="batch", definition="Requests in a round, mean."),
    Heading(title="busy", definition="Share of the time in which the busiest stage works."),
    Heading(title="J/token", definition="Energy of a token, at the devices' power limit."),
)


@dataclass(frozen=True, slots=True)
class SimulationReport(Results):
    """What was simulated; ``rows`` are the methods, and ``simulated`` their requests one by one."""

    simulated: tuple[Outcome, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.result["simulations"]
        return found

    @property
    def prompts_done(self) -> int:
        return max((row["answered"] for row in self.rows), default=0)

    def report(self) -> Report:
        result = self.result
        machine, trace = result["machine"], result["trace"]
        name = machine["hardware"]["name"]
        model = machine.get("shape", trace["model"])
        devices = machine.get("tensor_parallel", 1) * machine.get("pipeline_parallel", 1)
        where = f"{devices} x {name}" if devices > 1 else name
        facts = [f"trace of {trace['requests']} requests to {trace['model']}, by {trace['written_by']}"]
        facts += list(dict.fromkeys(f"{row['load']}; {row['acceptance']}; {row['drafting']}" for row in self.rows))
        return Report(
            command="outpace simulate",
            headline=f"Predicted, not measured: {model} on {where}.",
            model=str(model),
            version=result["version"],
            facts=facts,
            notes=result["notes"],
            tables=[Table("Simulated", _HEADINGS, [cells for row in self.rows for cells in _lines(row)])],
            about={"Machine": machine},
            settings=result["settings"],
        )


def _lines(row: Mapping[str, Any]) -> list[list[Cell]]:
    """A row, and its requests without drafts where these were simulated for it."""
    plain = row.get("baseline")
    return [_cells(row), *([] if plain is None else [_cells({**plain, "method": "  without drafts", "speedup": 1.0})])]


def _cells(row: Mapping[str, Any]) -> list[Cell]:
    busy = max((one for one in row["utilization"] if one is not None), default=None)
    return [
        Cell(row["method"], "strong"),
        Cell(number(row["tokens_per_second"])),
        Cell(number(row["user_tokens_per_second"])),
        Cell(times(row["speedup"])),
        Cell(number(row["mean_acceptance_length"], 2)),
        Cell(number(row["ttft_ms"]["p50"])),
        Cell(number(row["ttft_ms"]["p99"])),
        Cell(number(row["mean_batch"])),
        Cell(percent(busy)),
        Cell(number(row["joules_per_token"], 2)),
    ]

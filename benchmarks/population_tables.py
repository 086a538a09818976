"""Tables of what ``benchmarks/populations.py`` measured, pooled over its parts, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from cells import model_label
from lossy_tables import figure, pooled
from outpace.bench.figure_text import bounds, number, percent, times
from outpace.bench.statistics import speedup, speedup_interval, total_rate
from page_tables import Results

SCRIPT = "populations.py"


def study_lines(study: str, results: Results) -> list[str]:
    """A study as Markdown: what was measured, and a table."""
    kind = study.partition("-")[0]
    if kind == "error":
        return _errors(results)
    return _gates(results) if kind in ("gates", "scores") else _rows(kind, results)


def _rows(kind: str, results: Results) -> list[str]:
    asked = [one["rows"] for result in results for one in result["per_prompt"]]
    first = results[0]
    same = kind in ("transformers", "beams")
    lines = [
        _about(first["settings"], first["machine"], len(asked)),
        "",
        "| | tokens per second | tokens per round | speed-up | 95 % |" + (" same answers |" if same else ""),
        "|---|---|---|---|---|" + ("---|" if same else ""),
    ]
    for name, base in first["bases"].items():
        mine = [(one[name]["tokens"], one[name]["seconds"]) for one in asked]
        rounds = [one[name]["tokens_per_round"] for one in asked if one[name]["tokens_per_round"] is not None]
        line = f"| {name} | {number(total_rate(mine))} | {number(statistics.mean(rounds) if rounds else None, 2)} |"
        if base:
            theirs = [(one[base]["tokens"], one[base]["seconds"]) for one in asked]
            line += f" {times(speedup(mine, theirs))} | {bounds(speedup_interval(mine, theirs))} |"
        else:
            line += " | |"
        if same:
            line += " |" if not base or "temperature" in name else f" {_equal(asked, name, base)} |"
        lines.append(line)
    return lines


def _equal(asked: list[Mapping[str, Any]], name: str, base: str) -> str:
    equal = sum(one[name]["answer"] == one[base]["answer"] for one in asked)
    return f"{equal} of {len(asked)}"


def _gates(results: Results) -> list[str]:
    rows = pooled(results)
    scored = any(row.quality["score"] is not None for row in rows)
    settings = results[0]["settings"] | {"model": model_label(results[0]["model"]["name"])}
    lines = [
        _about(settings, results[0]["machine"], rows[0].prompts),
        "",
        "| | tokens per forward | speed-up | 95 % | excess NLL | 95 % | edits |" + (" score | cut |" if scored else ""),
        "|---|---|---|---|---|---|---|" + ("---|---|" if scored else ""),
    ]
    for row in rows:
        found = row.quality
        line = (
            f"| `{row.name}` | {number(row.length, 2)} | {times(row.speed)} | {bounds(row.speed_ci95)} | "
            f"{figure(found['excess_nll'], '+.4f')} | {bounds(found['excess_nll_ci95'], 4)} | "
            f"{percent(found['edit_distance'])} |"
        )
        lines.append(line + (f" {percent(found['score'])} of {found['of']} | {found['cut_off']} |" if scored else ""))
    return lines


def _errors(results: Results) -> list[str]:
    lines = [
        f"A toy target of {results[0]['vocabulary']} tokens, {results[0]['runs']:,} runs of each number.",
        "",
        "| particles | TV of the answer | of as many samples | 95 % of these | error of an estimate | 95 % |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {one['particles']} | {one['answer_tv']:.3f} | {one['tv_of_samples']:.3f} | "
        f"{bounds(one['tv_of_samples_range'], 3)} | "
        f"{percent(one['relative_rmse'])} | {bounds([100 * end for end in one['relative_rmse_ci95']], 0)} |"
        for one in sorted(results, key=lambda one: int(one["particles"]))
    ]


def _about(settings: Mapping[str, Any], machine: Mapping[str, Any], prompts: int) -> str:
    return (
        f"{settings['model']}, {prompts} prompts, {settings['max_new_tokens']} tokens, {machine['cpu']}, "
        f"threads: {machine['threads']}."
    )

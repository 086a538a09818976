"""Tables of what ``benchmarks/lossy_frontier.py`` measured: pooled over its parts, as Markdown, written into a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cells import model_label
from outpace.bench.figure_text import bounds, percent, times
from outpace.bench.quality.frontier import on_frontier
from outpace.bench.quality.prompt_quality import PromptQuality
from outpace.bench.quality.quality_row import quality_row
from outpace.bench.statistics import Rate, speedup, speedup_interval, total_rate
from outpace.methods.bindings import split_rule

SCRIPT = "lossy_frontier.py"


@dataclass(frozen=True, slots=True)
class Pooled:
    """A row over all parts of a study. ``gain``: its speed over that of the same drafter with its lossless rule."""

    name: str
    lossless: bool
    prompts: int
    length: float | None
    """Mean acceptance length: tokens committed per forward of the target."""
    speed: float | None
    speed_ci95: tuple[float, float] | None
    gain: float | None
    gain_ci95: tuple[float, float] | None
    quality: dict[str, Any]

    @property
    def rule(self) -> str:
        return split_rule(self.name)[1].partition("(")[0]

    @property
    def gains(self) -> bool:
        """Whether it is faster than the lossless rule, beyond the noise."""
        return self.gain_ci95 is not None and self.gain_ci95[0] > 1

    @property
    def pays(self) -> bool:
        """Whether it is faster than autoregressive decoding, beyond the noise."""
        return self.speed_ci95 is not None and self.speed_ci95[0] > 1


def pooled(results: Sequence[Mapping[str, Any]]) -> list[Pooled]:
    """The rows of a study, from the prompts of all its parts that every row answered."""
    greedy = not results[0]["settings"]["temperature"]
    names = {row["method"]: row["lossless"] for row in results[0]["methods"]}
    asked = [one for result in results for one in result["per_prompt"]]
    prompts = [one for one in asked if set(names) <= set(one.get("quality", ()))]
    rates = {name: [_rate(one, name) for one in prompts] for name in names}
    worth = {name: {str(at): PromptQuality(**one["quality"][name]) for at, one in enumerate(prompts)} for name in names}
    found = []
    for name, lossless in names.items():
        base = rates.get(split_rule(name)[0], rates["none"])
        quality = quality_row(worth[name], worth["none"], lossless=lossless, greedy=greedy, baseline=name == "none")
        speed, gain = speedup(rates[name], rates["none"]), speedup(rates[name], base)
        speed_ci95, gain_ci95 = speedup_interval(rates[name], rates["none"]), speedup_interval(rates[name], base)
        length = total_rate((one["committed"][name], one["rounds"][name]) for one in prompts)
        found.append(Pooled(name, lossless, len(prompts), length, speed, speed_ci95, gain, gain_ci95, quality))
    return found


def _rate(one: Mapping[str, Any], name: str) -> Rate:
    seconds = one["decode_seconds"][name]
    return (one["decode_tokens_per_second"][name] or 0.0) * seconds, seconds


def study_lines(study: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A study as Markdown: what was measured, a table, and what follows from it."""
    rows, used, machine, model = pooled(results), *(results[0][key] for key in ("settings", "machine", "model"))
    lines = [
        f"{model_label(model['name'])} ({model.get('dtype', '')}), temperature {used['temperature']:g}, "
        f"{rows[0].prompts} prompts, up to {used['max_new_tokens']} tokens, {machine['cpu']}, "
        f"threads: {machine['threads']}.",
        "",
    ]
    if study.startswith("scores"):
        return lines + [line for task, some in by_task(results).items() for line in _scores(task, some)]
    drafting = [row for row in rows if row.name != "none" and row.speed]
    best = {key: _frontier(drafting, key) for key in ("excess_nll", "tv")}
    lines += [
        "| row | tok/fwd | speed-up | over lossless | 95 % | excess NLL | 95 % | TV | 95 % | edits | frontier |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_divergence_line(row, best) for row in rows]
    return [*lines, "", *summary(drafting, best)]


def by_task(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The results with the prompts of one set of tasks alone, by its name: what its prompts' ids begin with."""
    names = dict.fromkeys(_task(one) for result in results for one in result["per_prompt"])
    return {
        name: [
            {**result, "per_prompt": [one for one in result["per_prompt"] if _task(one) == name]} for result in results
        ]
        for name in sorted(names)
    }


def _task(prompt: Mapping[str, Any]) -> str:
    return str(prompt["id"]).partition("#")[0].rstrip("0123456789").rstrip("-/:_ ") or "tasks"


def _scores(task: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = pooled(results)
    return [
        f"**{task}**, {rows[0].prompts} prompts:",
        "",
        "| row | tok/fwd | speed-up | over lossless | 95 % | score | 95 % | difference, points | 95 % |"
        " smallest shown | cut off | excess NLL |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_score_line(row) for row in rows),
        "",
    ]


def _frontier(rows: Sequence[Pooled], key: str) -> set[str]:
    """Names of the rows that no other dominates in speed and this divergence."""
    known = [row for row in rows if row.quality[key] is not None]
    on = on_frontier([(row.quality[key], row.speed or 0.0) for row in known], [row.lossless for row in known])
    return {row.name for row, marked in zip(known, on, strict=True) if marked}


def summary(rows: Sequence[Pooled], best: Mapping[str, set[str]]) -> list[str]:
    """Which rules gain over the lossless one, and which are dominated at every setting."""
    by_rule: dict[str, list[Pooled]] = {}
    for row in rows:
        if row.rule:
            by_rule.setdefault(row.rule, []).append(row)
    gains = [rule for rule, some in by_rule.items() if any(row.gains for row in some)]
    on = {rule for rule, some in by_rule.items() if any(row.name in names for row in some for names in best.values())}
    said = {
        "Faster than the lossless rule beyond the noise at some setting": gains,
        "Never faster than the lossless rule beyond the noise": [rule for rule in by_rule if rule not in gains],
        "Dominated at every setting, in both divergences": [rule for rule in by_rule if rule not in on],
        "On the frontier, and faster than the lossless rule and than autoregressive decoding beyond the noise": [
            f"`{row.name}`"
            for row in rows
            if row.rule and row.gains and row.pays and any(row.name in names for names in best.values())
        ],
    }
    return [f"- {what}: {', '.join(rules) or 'none'}." for what, rules in said.items()]


def overall(studies: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[str]]:
    """Tables over several studies, by the name of their marks: what was seen of each rule, for each model."""
    by_model: dict[str, dict[str, list[Pooled]]] = {}
    for study, results in studies.items():
        kind, _, rest = study.partition("-")
        if kind == "divergence":  # divergence-MODEL-DRAFTER-tTEMPERATURE; methods' names may have hyphens
            drafter = next(row["method"] for row in results[0]["methods"] if row["method"] != "none")
            model, _, temperature = rest.rpartition("-t")
            where = f"{drafter}, T {temperature}"
            by_model.setdefault(model.removesuffix(f"-{drafter}"), {})[where] = pooled(results)
    return {f"seen-{model}": _seen(rows) for model, rows in by_model.items()}


def _seen(studies: Mapping[str, Sequence[Pooled]]) -> list[str]:
    """One line for each rule and study: its fastest setting, and whether it gains, and whether others dominate it."""
    lines = [
        "| rule | drafter | fastest setting | tok/fwd, lossless | over lossless | 95 % | excess NLL | 95 % | TV | seen"
        " |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    found = []
    for where, rows in studies.items():
        drafting = [row for row in rows if row.name != "none" and row.speed]
        best = set.union(*(_frontier(drafting, key) for key in ("excess_nll", "tv")))
        plain = next((row for row in drafting if not row.rule), None)
        for rule in dict.fromkeys(row.rule for row in drafting if row.rule):
            some = [row for row in drafting if row.rule == rule]
            top = max(some, key=lambda row: row.gain or 0.0)
            seen = [_claim(some)]
            seen += [] if best & {row.name for row in some} else ["dominated"]
            lengths = f"{figure(top.length, '.2f')}, {figure(plain.length if plain else None, '.2f')}"
            found.append(
                f"| `{rule}` | {where} | `{split_rule(top.name)[1]}` | {lengths} | {times(top.gain)} | "
                f"{bounds(top.gain_ci95)} | {figure(top.quality['excess_nll'], '+.4f')} | "
                f"{bounds(top.quality['excess_nll_ci95'], 4)} | {figure(top.quality['tv'], '.4f')} | "
                f"{', '.join(seen)} |"
            )
    return lines + sorted(found)


def _claim(settings: Sequence[Pooled]) -> str:
    """What became of the papers' claim, more speed at hardly any loss, over a rule's settings."""
    faster = [row for row in settings if row.gains]
    if not faster:
        return "no gain shown"
    intervals = [row.quality["excess_nll_ci95"] for row in faster]
    free = any(interval and interval[0] <= 0 <= interval[1] for interval in intervals)
    return "faster, no excess NLL shown" if free else "faster, at a cost"


def _divergence_line(row: Pooled, best: Mapping[str, set[str]]) -> str:
    found = row.quality
    on = [said for key, said in (("excess_nll", "NLL"), ("tv", "TV")) if row.name in best[key]]
    return (
        f"{_beginning(row)} {times(row.gain)} | {bounds(row.gain_ci95)} | "
        f"{figure(found['excess_nll'], '+.4f')} | {bounds(found['excess_nll_ci95'], 4)} | "
        f"{figure(found['tv'], '.4f')} | {bounds(found['tv_ci95'], 4)} | {percent(found['edit_distance'])} | "
        f"{', '.join(on)} |"
    )


def _score_line(row: Pooled) -> str:
    found = row.quality
    points = [None if found[key] is None else 100 * found[key] for key in ("score_difference", "smallest_difference")]
    ci95 = [100 * one for one in found["score_difference_ci95"] or ()]
    return (
        f"{_beginning(row)} {times(row.gain)} | {bounds(row.gain_ci95)} | {percent(found['score'])} of {found['of']} | "
        f"{bounds(found['score_ci95'])} | "
        f"{figure(points[0], '+.1f')} | {bounds(ci95, 1)} | "
        f"{figure(points[1], '.1f')} | {found['cut_off']} | {figure(found['excess_nll'], '+.4f')} |"
    )


def _beginning(row: Pooled) -> str:
    return f"| `{row.name}` | {figure(row.length, '.2f')} | {times(row.speed)} |"


def figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)

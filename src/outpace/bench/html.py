"""The result as one HTML file: no network, no script, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any

from outpace.bench.charts import Colours, colours, position_chart, speedup_chart, split_chart
from outpace.bench.markup import tag, text, void
from outpace.bench.words import (
    DEFINITIONS,
    Row,
    agreement,
    drafted,
    drafting,
    headline,
    interval,
    notes,
    number,
    percent,
    split_text,
    times,
)
from outpace.core.files import write_atomically

_TILES = 6
_USE = ("entries", "bound", "evicted")


def write_html(result: Mapping[str, Any], path: str | Path) -> None:
    """Write the report. The file appears whole or not at all."""
    write_page(render(result), path)


def write_page(html: str, path: str | Path) -> None:
    """Write a page. The file appears whole or not at all."""
    write_atomically(Path(path), html.encode())


def render(result: Mapping[str, Any]) -> str:
    """The page."""
    palette = colours(result)
    parts = [_header(result)]
    if result["methods"]:
        parts += [
            _tiles(result, palette),
            *(tag("p", text(note), class_="note") for note in notes(result)),
            section(
                "Speed-up by task",
                "Decode rate over plain decoding's. Bars end at the measured ratio, whiskers are 95 % intervals, each "
                "small dot is one prompt. To the right of 1x is faster. The scale is logarithmic.",
                speedup_chart(result, palette),
            ),
            _table(result),
            tag(
                "div",
                section(
                    "Where the time goes",
                    "Milliseconds of decoding per token. Score is the target's forward.",
                    split_chart(result),
                ),
                section(
                    "Accepted by position",
                    "Share of rounds in which the draft token at this position was kept.",
                    position_chart(result, palette),
                ),
                class_="pair",
            ),
            _caches(result),
            _samples(result),
        ]
    parts += [facts(result), definitions(DEFINITIONS), footer(result)]
    return page(f"outpace bench: {result['model'].get('name', '')}", parts)


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document with the reports' style."""
    style = (resources.files("outpace.bench") / "assets" / "report.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", text(title)),
        tag("style", style),
    )
    return f'<!doctype html>\n<html lang="en">{head}{tag("body", tag("main", *parts))}</html>\n'


def _header(result: Mapping[str, Any]) -> str:
    settings, machine = result["settings"], result["machine"]
    sentence = re.sub(r", (?=[\d.,]+\])", ",\N{NO-BREAK SPACE}", headline(result))  # an interval stays on one line
    counted = max((row["prompts"] for row in result["methods"]), default=0)
    mode = "greedy" if not settings.get("temperature") else f"temperature {settings['temperature']:g}"
    facts = [
        f"{result['model'].get('name', 'model')} {result['model'].get('dtype') or ''}".strip().replace("torch.", ""),
        f"{counted} prompts, up to {settings.get('max_new_tokens')} tokens, {mode}, batch {settings.get('batch_size')}",
        f"{machine.get('cpu')}, {machine.get('threads')} threads",
    ]
    return tag(
        "header",
        tag("p", "outpace bench", class_="brand"),
        tag("h1", text(sentence)),
        tag("p", text(" · ".join(facts)), class_="lead"),
    )


def _tiles(result: Mapping[str, Any], palette: Colours) -> str:
    rows = sorted(drafted(result), key=lambda row: (bool(row["error"]), -(row["speedup"] or 0)))[:_TILES]
    tiles = []
    for row in rows:
        said = "failed" if row["error"] else agreement(row) and f"same on {agreement(row)}"
        tiles.append(
            tag(
                "div",
                tag("div", text(row["method"]), class_="name"),
                tag("div", text(times(row["speedup"])), class_="big"),
                tag("div", text(interval(row)), class_="small"),
                tag("div", text(said or ("lossless" if row["lossless"] else "lossy")), class_="small"),
                class_="tile",
                style=f"--tone:{palette[row['method']]}",
            )
        )
    return tag("div", *tiles, class_="tiles") if tiles else ""


def section(title: str, lead: str, body: str) -> str:
    """A card with a heading; nothing where there is nothing to show."""
    if not body:
        return ""
    return tag("section", tag("h2", text(title)), tag("p", text(lead), class_="lead") if lead else "", body)


def _table(result: Mapping[str, Any]) -> str:
    names = ["method", *DEFINITIONS]
    head = "".join(tag("th", text(name), title=DEFINITIONS.get(name)) for name in names)
    body = "".join(tag("tr", *(tag("td", cell) for cell in _cells(row))) for row in result["methods"])
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", body))
    return section("All figures", "", tag("div", table, class_="scroll"))


def _cells(row: Row) -> list[str]:
    low, high = row["speedup_ci95"] or (None, None)
    tone = "good" if low is not None and low > 1 else "bad" if high is not None and high < 1 else None
    same = row["identical"]
    ties = f" ({same['near_ties']} near ties)" if same and same["same"] < same["of"] else ""
    return [
        text(row["method"]),
        text(number(row["decode_tokens_per_second"])),
        tag("span", text(times(row["speedup"])), class_=tone) + " " + tag("span", text(interval(row)), class_="dim"),
        text(number(row["mean_acceptance_length"], 2)),
        text(percent(row["acceptance_rate"])),
        text(drafting(row)),
        text(number(row["draft_ms"], 2)),
        text(f"{number(row['ttft_ms'], 0)} ms"),
        text(f"{same['same']}/{same['of']}{ties}" if same else ("lossless" if row["lossless"] else "lossy")),
        text(number(row["peak_memory_mb"], 0)),
        text(split_text(row).replace("/", " / ")),
        text(percent(row["repeated_ngrams"])),
    ]


def _caches(result: Mapping[str, Any]) -> str:
    """How full the methods' caches were when the last request ended."""
    rows = [(row["method"], cache) for row in result["methods"] for cache in row["caches"]]
    if not rows:
        return ""
    head = "".join(tag("th", name) for name in ("method", "cache", "entries", "bound", "evicted"))
    body = "".join(
        tag(
            "tr", *(tag("td", text(cell)) for cell in (method, cache["name"], *(number(cache[key], 0) for key in _USE)))
        )
        for method, cache in rows
    )
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", body))
    kept = result["settings"].get("namespace")
    lead = "When the last request ended" + (f", in namespace '{kept}'." if kept else "; gone with it.")
    return section("Caches", f"{lead} What does not fit leaves, the least recently used first.", table)


def _samples(result: Mapping[str, Any]) -> str:
    blocks: list[str] = []
    for sample in result.get("samples", ()):
        answers = dict(sample["answers"])
        plain = answers.pop("none", None)
        parts = [tag("h4", "prompt"), tag("pre", text(sample["prompt"]))]
        if plain is not None:
            parts += [tag("h4", "none"), tag("pre", text(plain))]
        equal = [name for name, answer in answers.items() if answer == plain]
        for name, answer in answers.items():
            if name not in equal:
                parts += [tag("h4", text(name)), tag("pre", _marked(answer, plain or ""))]
        if equal:
            parts.append(tag("p", text(f"The same, word for word: {', '.join(equal)}."), class_="dim"))
        title = tag("summary", text(sample["category"]), " ", tag("span", text(sample["id"])))
        blocks.append(tag("details", title, *parts, open=None if blocks else ""))
    lead = "The first prompt of each task, first turn. Marked: from the first difference on."
    return section("Answers, side by side", lead, "".join(blocks))


def _marked(answer: str, plain: str) -> str:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, plain, strict=False)))
    return text(answer[:same]) + (tag("mark", text(answer[same:])) if same else text(answer))


def facts(result: Mapping[str, Any]) -> str:
    """The machine, the model and the settings."""
    model = {key: value for key, value in result["model"].items() if key != "location"}  # a report may be shared
    boxes = [
        tag("section", tag("h2", name), _listing(values))
        for name, values in (("Machine", result["machine"]), ("Model", model))
        if values
    ]
    settings = {key: value for key, value in result["settings"].items() if key != "command"}
    if "namespace" in settings:
        settings["namespace"] = settings["namespace"] or "none: nothing outlives a request"
    command = result["settings"].get("command")
    made = tag("pre", text(command)) if command else ""
    folded = tag("details", tag("summary", "Settings"), _listing(settings)) if settings else ""
    return tag("div", *boxes, class_="pair") + section("How this was made", "", made + folded)


def _listing(values: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in values.items() if value not in (None, "", {}, [])}
    return tag("dl", *(tag("dt", text(_key(key))) + tag("dd", text(_fact(value))) for key, value in shown.items()))


def _key(name: str) -> str:
    return name.replace("_", " ")


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_fact, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_fact(item)}" for key, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


def definitions(meanings: Mapping[str, str]) -> str:
    """What the figures mean."""
    pairs = [tag("dt", text(name)) + tag("dd", text(meaning)) for name, meaning in meanings.items()]
    return tag("section", tag("h2", "What the figures mean"), tag("dl", *pairs))


def footer(result: Mapping[str, Any]) -> str:
    """The last line."""
    return tag("footer", text(f"outpace {result['version']}. This file stands alone: no network, no scripts."))

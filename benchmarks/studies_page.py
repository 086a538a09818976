"""The results of docs/studies.md, from the JSON of the studies that were run.

    outpace study moesd --json out/studies/moesd.json
    python benchmarks/studies_page.py out/studies

Each file is a section, called by the file's name, so that a study of two models may have two. Sections without a file
in the folder stay as they are. Plots go to docs/assets/studies. Nothing between the marks is written by hand: the list
of all verdicts, then of each study its plot, what was found of each claim, and the table, folded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outpace.core.files import write_atomically
from outpace.studies.study_report import Figure, figures_of, shown

MARK, END = "<!-- results -->", "<!-- end of results -->"
VERDICTS = ("confirmed", "refuted", "undecided")
PAGE = Path(__file__).parents[1] / "docs" / "studies.md"
ASSETS = PAGE.parent / "assets" / "studies"


def section(name: str, found: Mapping[str, Any]) -> str:
    """One study: its plot, the claims, the table, and what it was run with."""
    machine, model, settings = found["machine"], found["model"], found["settings"]
    columns = figures_of(found["columns"])
    where = f"{model['name']}, {settings['prompts']} prompts, " if model else ""
    lines = [f"### {name}: {found['title']}", "", f"![{found['plot']['title']}](assets/studies/{name}.svg)"]
    lines += ["", f"Claims of {found['paper']}:"] if found["claims"] else []
    lines += ["", "| claim | verdict | found |", "|---|---|---|"] if found["claims"] else []
    lines += [f"| {one['says']} | **{one['verdict']}** | {_found(one)} |" for one in found["claims"]]
    lines += ["", *found["notes"], "", '<details markdown="1">', "<summary>All figures</summary>"]
    lines += ["", "| " + " | ".join(one.title for one in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row, one) for one in columns) + " |" for row in found["rows"]]
    lines += ["", "</details>", ""]
    run = f"{where}{machine['cpu']}, {found['seconds']:.0f} s, version {found['version']}"
    lines.append(f"`{settings['command']}` ({run})")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], one: Figure) -> str:
    return f"{shown(row.get(one.name))} {one.interval(row)}".rstrip()


def _found(one: Mapping[str, Any]) -> str:
    """What was found, beside what it is compared with."""
    if one["found"] is None:
        return str(one["test"])
    if one["test"].startswith("share of resamples"):
        return f"true in {100 * one['found']:.3g} % of the resamples"
    interval = f" [{one['interval'][0]:.3g}, {one['interval'][1]:.3g}]" if one["interval"] else ""
    limit = one["test"].removeprefix("by formula, ")
    return f"{one['found']:.3g}{interval}; true if {limit}{', by formula' if limit != one['test'] else ''}"


def overview(found: Iterable[str]) -> str:
    """All sections with how many of their claims have each verdict."""
    lines = ["| study | " + " | ".join(VERDICTS) + " |", "|---|" + "---|" * len(VERDICTS)]
    for text in found:
        heading = text.splitlines()[0].removeprefix("### ")
        counts = [text.count(f"| **{verdict}** |") for verdict in VERDICTS]
        shown = " | ".join(str(one) if one else "" for one in counts)
        lines.append(f"| [{heading}](#{_anchor(heading)}) | {shown} |")
    return "\n".join(lines)


def _anchor(heading: str) -> str:
    """As mkdocs makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def sections(body: str) -> dict[str, str]:
    """The sections that the page has, by name."""
    found = re.split(r"^### ", body, flags=re.MULTILINE)[1:]
    return {one.partition(":")[0]: f"### {one.rstrip()}" for one in found}


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in Path(sys.argv[1]).glob("*.json")}
    if not results:
        print(f"there is no study in {sys.argv[1]}", file=sys.stderr)
        return 2
    ASSETS.mkdir(parents=True, exist_ok=True)
    for name, one in results.items():
        write_atomically(ASSETS / f"{name}.svg", one["svg"].encode())
    before, _, body = PAGE.read_text(encoding="utf-8").partition(MARK)
    body, _, after = body.partition(END)
    found = sections(body) | {name: section(name, one) for name, one in results.items()}
    found = dict(sorted(found.items()))
    text = "\n\n".join((overview(found.values()), *found.values()))
    write_atomically(PAGE, f"{before}{MARK}\n\n{text}\n\n{END}{after or chr(10)}".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The tables of docs/engines.md, from what ``make engines`` has found, and a summary of them.

    python benchmarks/engines_table.py out/engines.json

Rewrites the lines between the two marks of that page. Exit code 2: bad input.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
BEGIN, END = "<!-- table: engines -->", "<!-- end of the table -->"
CERTIFICATES = ("| engine | configuration | certificate | draft tokens accepted |", "|---|---|---|---|")
VERDICTS = {True: "passed", False: "refused", None: "inconclusive"}
NAMES = {"own pld": "vLLM's own n-gram", "own sam": "vLLM's own suffix"}
"""What the tests call otherwise."""
HEADER = ("| engine | method | greedy answers identical | accepted length | outpace's own |", "|---|---|---|---|---|")


def lines(found: Mapping[str, Any]) -> list[str]:
    """The table, a line a method."""
    table = [*HEADER]
    for engine, about in found.items():
        for method, row in about.get("methods", {}).items():
            theirs, ours = _number(row["mean_acceptance_length"]), _number(row["outpace"])
            same = f"{row['identical']} of {row['prompts']}"
            table.append(f"| {engine} {about['version']} | {NAMES.get(method, method)} | {same} | {theirs} | {ours} |")
    return table


def certificates(found: Mapping[str, Any]) -> list[str]:
    """The table of certificates, a line a server."""
    table = [*CERTIFICATES]
    for engine, about in found.items():
        for configuration, row in about.get("certificates", {}).items():
            counts = row["speculation"] or {"accepted": "-", "drafted": "-"}
            counted = f"{counts['accepted']} of {counts['drafted']}"
            verdict = VERDICTS[row["lossless"]]
            table.append(f"| {engine} {about['version']} | {configuration} | {verdict} | {counted} |")
    return table


def summary(found: Mapping[str, Any]) -> list[str]:
    """What the tables show, a line an engine and question."""
    told = []
    for engine, about in found.items():
        name, methods = f"{engine} {about['version']}", about.get("methods", {})
        same = sum(row["identical"] == row["prompts"] for row in methods.values())
        told.append(f"{name}: greedy answers identical to those without speculation: {same} of {len(methods)} methods")
        apart = [abs(row["mean_acceptance_length"] - row["outpace"]) for row in methods.values() if row["outpace"]]
        if apart:
            told.append(f"{name}: accepted lengths at most {max(apart):.3f} from outpace's own ({len(apart)} methods)")
        told += [
            f"{name}: {configuration}: {VERDICTS[row['lossless']]}"
            for configuration, row in about.get("certificates", {}).items()
        ]
    return told


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def rewritten(page: str, found: Mapping[str, Any]) -> str:
    """The page with its table replaced. Raises ValueError for one without the marks."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{PAGE} has no marks {BEGIN} and {END}")
    return "\n".join((before + BEGIN, "", *lines(found), "", *certificates(found), "", END + after))


def main() -> int:
    try:
        found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    except (OSError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        print(f"error: {type(error).__name__}: {error}; run make engines first", file=sys.stderr)
        return 2
    print("\n".join((*lines(found), "", *certificates(found), "", *summary(found), f"written to {PAGE}")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

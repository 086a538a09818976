"""Tables of a study's parts, printed, and written into a page between the marks of each study."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.files import write_atomically

Results = Sequence[Mapping[str, Any]]
_OF_A_PART = ("prompts", "categories", "skipped_turns", "warmup_tokens")
"""Settings that say what a part holds."""
_ADVICE = "parts of several runs are not pooled: move those of one away, or give each run its own --out"


def marks(script: str) -> tuple[str, str]:
    """The marks around what ``script`` measured; ``{}`` stands for the study."""
    return f"<!-- measured by benchmarks/{script}: {{}} -->", "<!-- end: {} -->"


def write_tables(
    folder: Path,
    page: Path | None,
    script: str,
    lines_of: Callable[[str, Results], list[str]],
    overall: Callable[[Mapping[str, Results]], Mapping[str, list[str]]] = lambda _: {},
) -> None:
    """Print every study in ``folder``, by ``lines_of`` its name and results; write it between its marks on the page.
    ``overall``: tables over all studies, by the name of their marks.

    Ends the program, with what to do, where the parts of a study cannot be pooled.
    """
    studies: dict[str, dict[Path, Mapping[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        studies.setdefault(file.stem.rpartition("-")[0], {})[file] = json.loads(file.read_text())
    try:
        for parts in studies.values():
            check_alike(parts)
    except BadInput as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        raise SystemExit(2) from None
    text = page.read_text() if page else ""
    found = {study: list(parts.values()) for study, parts in studies.items()}
    tables = {study: lines_of(study, results) for study, results in found.items()}
    for study, lines in {**tables, **overall(found)}.items():
        print(f"{study}\n", *lines, "", sep="\n")
        text = written(text, study, lines, script)
    if page:
        write_atomically(page, text.encode())


def check_alike(parts: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raise BadInput where a study's parts have other settings or rows than its first, or have a prompt in common."""
    (first, one), *_ = parts.items()
    known: dict[str, Path] = {}
    for file, part in parts.items():
        for what, value in _conditions(part).items():
            if value != _conditions(one).get(what):
                raise BadInput(f"{file.name}: {what} not as in {first.name}; {_ADVICE}")
        for name in [asked["id"] for asked in part.get("per_prompt", ())]:
            if name in known:
                raise BadInput(f"{file.name}: prompt '{name}' stands in {known[name].name} too; {_ADVICE}")
            known[name] = file


def _conditions(part: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal in parts that are pooled, by what a refusal calls it."""
    settings = {f"setting '{key}'": one for key, one in part.get("settings", {}).items() if key not in _OF_A_PART}
    machine = {f"the machine's {key}": part["machine"].get(key) for key in ("cpu", "threads") if "machine" in part}
    model = {"the model's precision": part["model"].get("dtype")} if "model" in part else {}
    return {"rows": [row["method"] for row in part.get("methods", ())]} | settings | machine | model


def written(text: str, study: str, lines: Sequence[str], script: str) -> str:
    """``text`` with the lines between the study's marks; unchanged where it has no such marks."""
    begin, end = (mark.format(study) for mark in marks(script))
    before, marked, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + after if marked and closed else text

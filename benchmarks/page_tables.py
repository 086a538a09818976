"""Tables of a study's parts, printed, and written into a page between the marks of each study."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.core.files import write_atomically

Results = Sequence[Mapping[str, Any]]


def marks(script: str) -> tuple[str, str]:
    """The marks around what ``script`` measured; ``{}`` stands for the study."""
    return f"<!-- measured by benchmarks/{script}: {{}} -->", "<!-- end: {} -->"


def write_tables(folder: Path, page: Path | None, script: str, lines_of: Callable[[str, Results], list[str]]) -> None:
    """Print every study in ``folder``, by ``lines_of`` its name and results; write it between its marks on the page."""
    studies: dict[str, list[Mapping[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        studies.setdefault(file.stem.rpartition("-")[0], []).append(json.loads(file.read_text()))
    text = page.read_text() if page else ""
    for study, results in studies.items():
        lines = lines_of(study, results)
        print(f"{study}\n", *lines, "", sep="\n")
        text = written(text, study, lines, script)
    if page:
        write_atomically(page, text.encode())


def written(text: str, study: str, lines: Sequence[str], script: str) -> str:
    """``text`` with the lines between the study's marks; unchanged where it has no such marks."""
    begin, end = (mark.format(study) for mark in marks(script))
    before, marked, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + after if marked and closed else text

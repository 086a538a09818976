"""The page of results: a file's section is written anew, sections without a file stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import studies_page
from outpace.model import Model
from outpace.studies.registry import StudyContext, find_study, read_settings, run_study


def no_model(name: str, dtype: str | None) -> Model:
    raise AssertionError("this study needs no model")


def test_sections_with_a_file_are_written_anew_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, results = tmp_path / "studies.md", tmp_path / "out"
    page.write_text(
        f"# Studies\n\n{studies_page.MARK}\n\n### accdyn: Kept\n\ntext\n\n### moesd: Old\n\nold\n\n"
        f"{studies_page.END}\n\n## How\n"
    )
    monkeypatch.setattr(studies_page, "PAGE", page)
    monkeypatch.setattr(studies_page, "ASSETS", tmp_path / "assets")
    one = find_study("moesd")
    wish = {"tiny": False, "batches": [1, 8], "lengths": [3]}
    found = run_study(one, StudyContext("none", [], no_model), read_settings(one, wish))
    results.mkdir()
    for name in ("moesd", "moesd-2"):
        (results / f"{name}.json").write_text(json.dumps(found.result))
    for _ in range(2):  # a second time changes nothing
        monkeypatch.setattr("sys.argv", ["studies_page.py", str(results)])
        assert studies_page.main() == 0
        text = page.read_text()
        headings = [line for line in text.splitlines() if line.startswith("### ")]
        assert text.endswith(f"{studies_page.END}\n\n## How\n")
        assert text.index("| [moesd-2: ") < text.index("### accdyn"), "verdicts of all studies come first"
        assert headings == ["### accdyn: Kept", f"### moesd: {one.title}", f"### moesd-2: {one.title}"]
        assert "\nold\n" not in text and text.startswith("# Studies\n\n") and "\n\ntext\n\n" in text
    assert (tmp_path / "assets" / "moesd-2.svg").read_text().startswith("<svg")
    assert all(claim["says"] in text for claim in found.result["claims"])
    monkeypatch.setattr("sys.argv", ["studies_page.py", str(tmp_path / "nothing")])
    assert studies_page.main() == 2

"""benchmarks/engines_table.py: the tables of docs/engines.md and the closing lines of ``make engines``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import engines_table
from engine_results import FILE, keep

METHODS = {
    "eagle3": {"prompts": 8, "identical": 8, "mean_acceptance_length": 1.9312, "outpace": 1.9184},
    "Proposer: rest": {"prompts": 8, "identical": 7, "mean_acceptance_length": 1.172, "outpace": None},
}
CERTIFICATES = {
    "as released": {"lossless": False, "speculation": {"accepted": 76, "drafted": 994}},
    "mended": {"lossless": True, "speculation": None},
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What two test files have found, one after the other."""
    file = tmp_path / "engines.json"
    monkeypatch.setenv(FILE, str(file))
    keep("vllm", {"version": "0.32.0", "methods": METHODS})
    keep("vllm", {})  # a file whose engine was not found
    keep("vllm", {"version": "0.32.0", "certificates": CERTIFICATES})
    return file


def ran(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["engines_table.py", *map(str, arguments)])
    return engines_table.main()


def test_the_page_is_rewritten_between_its_marks(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "engines.md"
    page.write_text(f"before\n\n{engines_table.BEGIN}\n\nold\n\n{engines_table.END}\nafter\n")
    monkeypatch.setattr(engines_table, "PAGE", page)
    for _ in range(2):  # the second run replaces the first one's
        assert ran(monkeypatch, results) == 0
    text = page.read_text()
    assert text.startswith("before\n\n<!--") and text.endswith("-->\nafter\n")
    assert "old" not in text and text.count("| vllm 0.32.0 |") == 4
    assert "| vllm 0.32.0 | eagle3 | 8 of 8 | 1.931 | 1.918 |" in text
    assert "| vllm 0.32.0 | as released | refused | 76 of 994 |" in text
    assert "| vllm 0.32.0 | mended | passed | - of - |" in text
    said = capsys.readouterr().out
    assert "identical to those without speculation: 1 of 2 methods" in said
    assert "at most 0.013 from outpace's own (1 methods)" in said
    assert "as released: refused" in said
    assert said.endswith(f"written to {page}\n")


@pytest.mark.parametrize("content", [None, "no json", '{"vllm": {"methods": {"a": {}}}}', "[1]"])
def test_without_results_the_page_stays_as_it_was(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, file = tmp_path / "engines.md", tmp_path / "engines.json"
    page.write_text(before := f"{engines_table.BEGIN}\n{engines_table.END}\n")
    monkeypatch.setattr(engines_table, "PAGE", page)
    if content is not None:
        file.write_text(content)
    assert ran(monkeypatch, file) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert page.read_text() == before


def test_results_of_another_version_leave(results: Path) -> None:
    keep("vllm", {"version": "0.32.1", "methods": {}})
    found: dict[str, Any] = json.loads(results.read_text())
    assert found == {"vllm": {"version": "0.32.1", "methods": {}}}

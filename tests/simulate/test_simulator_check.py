"""benchmarks/simulator_check.py: its table says what was measured and fitted, and goes into a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simulator_check
from cells import read_cells
from outpace.core.errors import BadInput


def cell(method: str, batch: int, fitted: bool, off: float) -> dict[str, Any]:
    figures = dict.fromkeys(simulator_check.FIGURES, 100.0)
    return {
        **{"model": "smollm2", "method": method, "batch": batch, "fitted": fitted, "pause": 0.002 * batch},
        "machine": {"measured": ["seconds of forwards"], "fitted": ["rounds take 1.2 times as long"]},
        **{"measured": figures, "predicted": {name: one * off for name, one in figures.items()}},
    }


def test_the_table_says_what_was_fitted(tmp_path: Path) -> None:
    cells = [cell("none", 1, True, 3.0), cell("pld", 1, False, 1.05), cell("pld", 2, False, 0.8)]
    text = simulator_check.table(cells)
    assert "none (fitted)" in text
    assert "| tokens_per_second | 12.5 % | 50 % of 2 |" in text, "the fitted cell is left out"
    assert text.count("Fitted, smollm2: rounds take 1.2 times as long.") == 1
    assert "Measured beforehand, smollm2: seconds of forwards." in text
    assert "smollm2, batch 1: 2.0 ms; smollm2, batch 2: 4.0 ms" in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{simulator_check.MARK}\nold\n{simulator_check.END}\nafter\n")
    simulator_check.page(page, cells)
    simulator_check.page(page, cells)
    assert page.read_text() == f"before\n{simulator_check.MARK}\n\n{text}\n\n{simulator_check.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(BadInput, match="to write between"):
        simulator_check.page(page, cells)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> int:
    command = ["simulator_check.py", "--out", str(out), "--methods", "none,pld", "--batches", "1", *more]
    monkeypatch.setattr("sys.argv", command)
    return simulator_check.main()


def test_cells_of_other_settings_are_not_mixed_and_a_failed_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(options: Any, model: Any, wanted: Any, *_: Any) -> dict[str, Any]:
        if wanted[1] == "pld" and options.tokens == 8 and not works:
            raise RuntimeError("1 requests failed")
        return cell(wanted[1], wanted[2], False, 1.0)

    works: list[bool] = []
    monkeypatch.setattr(simulator_check, "cell", measured)
    monkeypatch.setattr("simulator_check.outpace.load", lambda name: None)
    monkeypatch.setattr("simulator_check.torch.set_num_threads", lambda count: None)
    out = tmp_path / "cells.jsonl"
    assert run(monkeypatch, out, "--tokens", "8") == 1
    works.append(True)
    assert run(monkeypatch, out, "--tokens", "8") == 0
    assert run(monkeypatch, out, "--tokens", "9", "--requests", "3") == 2
    assert "holds cells with another requests, tokens; name another file" in capsys.readouterr().err
    (tmp_path / "prompts.txt").write_text("Why?")
    assert run(monkeypatch, out, "--tokens", "8", "--prompts", str(tmp_path / "prompts.txt")) == 2
    assert "another prompts" in capsys.readouterr().err
    assert len(read_cells(out)) == 2


def test_the_page_of_the_documentation_has_the_marks() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    assert simulator_check.MARK in text and simulator_check.END in text

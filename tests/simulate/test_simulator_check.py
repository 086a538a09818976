"""benchmarks/simulator_check.py: its table says what was measured and fitted, and goes into a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simulator_check
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


def test_the_page_of_the_documentation_has_the_marks() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    assert simulator_check.MARK in text and simulator_check.END in text

"""benchmarks/advice_check.py: which prompts are advised on, and what is printed of predictions and measurements."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from advice_check import halves, heads_of, summary
from layouts_support import head_of, written
from outpace.core.errors import BadInput
from outpace.prompts.questions import load_prompts


def cell(method: str, predicted: float, measured: float | None, ci95: list[float] | None) -> dict[str, Any]:
    interval = [predicted - 0.1, predicted + 0.1]
    return {"method": method, "predicted": predicted, "interval": interval, "measured": measured, "ci95": ci95}


def piece(recommended: str, *cells: dict[str, Any], batch: int = 1, temperature: float = 0.0) -> dict[str, Any]:
    return {
        "model": "m.gguf",
        "temperature": temperature,
        "batch": batch,
        "recommended": recommended,
        "cells": list(cells),
    }


def test_halves_share_no_prompt_and_have_all_categories() -> None:
    prompts = load_prompts()
    ours, others = halves(prompts)
    assert not {one.id for one in ours} & {one.id for one in others}
    assert len(ours) + len(others) == len(prompts)
    counts = [Counter(one.category for one in part) for part in (ours, others)]
    assert all(counts[0][name] - counts[1][name] in (0, 1) for name in counts[0])


def test_a_head_is_for_one_of_the_models(tmp_path: Path) -> None:
    folder = str(written(head_of("medusa"), "medusa", tmp_path / "head"))
    assert heads_of([f"m.gguf={folder}"], ["smollm2", "m.gguf"]) == {"m.gguf": [folder]}
    for text, said in ((folder, "--head takes MODEL=FOLDER"), ("other=x", "--models"), ("smollm2=/nowhere", "nowhere")):
        with pytest.raises(BadInput, match=said):
            heads_of([text], ["smollm2"])


def test_errors_coverage_and_regret_are_counted_also_by_batch() -> None:
    found = summary(
        [
            piece("sam", cell("sam", 1.5, 1.5, [1.4, 1.6]), cell("pld", 1.2, 1.6, [1.5, 1.7])),
            piece("none", cell("sam", 0.9, 0.8, [0.7, 0.9]), batch=16, temperature=0.8),
        ]
    )
    text = "\n".join(found)
    assert "all: median error 11.8 %, 2 of 3 within 5 % or the measured interval, 2 of 3 (67 %)" in text
    assert "batch 16: median error 11.8 %, 1 of 1 within 5 % or the measured interval, 1 of 1 (100 %)" in text
    assert "temperature 0: median error 14.4 %" in text
    assert "regret of the recommendation 3.1 %" in text
    assert "in 1 of 1 pieces in which nothing was surely above 1.02x" in text
    assert "in 0 of 1 pieces in which the best method was surely above it" in text


def test_none_that_was_wrongly_recommended_is_counted() -> None:
    text = "\n".join(summary([piece("none", cell("sam", 1.0, 1.5, [1.4, 1.6]))]))
    assert "in 1 of 1 pieces in which the best method was surely above it" in text


@pytest.mark.parametrize("recommended", ["none", "a"])
def test_pieces_of_which_nothing_was_measured_are_left_out(recommended: str) -> None:
    unmeasured = piece(recommended, cell("a", 1.1, None, None))
    assert summary([unmeasured]) == ["nothing was measured yet"]
    assert any("regret" in line for line in summary([unmeasured, piece("a", cell("a", 1.1, 1.1, [1.0, 1.2]))]))


def test_without_a_measured_interval_nothing_is_judged_by_one() -> None:
    text = "\n".join(summary([piece("none", cell("a", 1.0, 1.2, None), batch=16)]))
    assert "0 of 1 within 5 %" in text
    assert "in 0 of 0 pieces in which nothing was surely" in text
    assert "1 cells have no measured interval" in text

"""benchmarks/cells.py: lines of a file, and what is left of a long measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cells
from outpace.core.errors import BadInput


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    assert cells.read_cells(path) == []
    cells.append_cell(path, {"at": 1})
    with path.open("a") as file:
        file.write('{"at": 2, "se')
    assert cells.read_cells(path) == [{"at": 1}]
    cells.append_cell(path, {"at": 3})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"at": 1}, {"at": 3}]
    path.write_text('nothing\n{"at": 1}\n')
    with pytest.raises(BadInput, match="line 1: not JSON"):
        cells.read_cells(path)


def test_a_file_is_not_gone_on_with_under_other_settings(tmp_path: Path) -> None:
    out, done = tmp_path / "cells.jsonl", [{"model": "m"}]
    cells.check_settings(out, {"tokens": 48}, {"m": "small"}, [])
    cells.check_settings(out, {"tokens": 48}, {"m": "small", "n": None}, done)  # a further model
    for said, models, name in (
        ({"tokens": 64}, {"m": "small"}, "tokens"),
        ({"tokens": 48}, {"m": "other"}, "draft of m"),
    ):
        with pytest.raises(BadInput, match=f"cells with another {name}"):
            cells.check_settings(out, said, models, done)
    with pytest.raises(BadInput, match="cells with another"):
        cells.check_settings(tmp_path / "unknown.jsonl", {"tokens": 48}, {"m": "small"}, done)


def test_cells_are_run_until_the_time_is_over() -> None:
    now, done = [0.0], {"a"}
    said: list[str] = []
    run = cells.CellRun(2.0, said.append, lambda: now[0])
    run.known("slow", 120.0)
    kinds = {"a": "quick", "b": "quick", "c": "quick", "d": "slow"}
    for one in run.each(list(kinds), done.__contains__, kinds.__getitem__):
        now[0] += 90.0
        done.add(one)
    assert done == {"a", "b", "c"}
    assert said == [
        "1 of 4 done, about 6 min left",
        "2 of 4: 90 s, about 4 min left",
        "3 of 4: 90 s, about 2 min left",
        "the time is over; 1 left, the same command goes on",
    ]
    with pytest.raises(BadInput, match="--max-minutes"):
        cells.CellRun(0.0)


def test_models_are_named_with_their_draft_models() -> None:
    assert cells.models_and_drafts(["smollm2", "a.gguf=b.gguf"]) == {"smollm2": None, "a.gguf": "b.gguf"}
    for wrong in (["a="], ["=b"], ["a", "a=b"]):
        with pytest.raises(BadInput, match="MODEL or MODEL=DRAFT"):
            cells.models_and_drafts(wrong)
    assert cells.numbers("--batches", "4,1,4") == [4, 1]
    for text in ("", "0", "1,x"):
        with pytest.raises(BadInput, match="--batches"):
            cells.numbers("--batches", text)

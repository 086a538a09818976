"""benchmarks/populations.py: every study decodes, goes on where it ended, and writes its table into a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import outpace
import populations
from cli_support import toy
from page_tables import marks
from particle_errors import particle_errors
from population_tables import SCRIPT

TEXTS = ("abc abc abc", "xyz xyz", "abd")
BEGIN, END = marks(SCRIPT)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(outpace, "load", lambda name, **_: toy(name))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    small = "--model toy --draft-model toy --batch 2 --max-new-tokens 6 --threads 1 --samples 2 --beams 2 --particles 2"
    return ["run", "--out", str(tmp_path / "out"), "--prompts", str(file), *small.split()]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["populations.py", *words])
    populations.main()


def test_the_studies_go_on_where_they_ended_and_write_their_tables(
    study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["--studies", "groups", "beams", "particles", "gates", "error", "--error-particles", "2", "--runs", "20"]
    run(monkeypatch, *study, *wanted[:2])
    run(monkeypatch, *study, *wanted)
    assert "2 of 9 parts are done" in capsys.readouterr().out
    run(monkeypatch, *study, *wanted)
    assert "9 of 9 parts are done" in capsys.readouterr().out
    page = tmp_path / "page.md"
    marked = "".join(f"{BEGIN.format(one)}\nold {one}\n{END.format(one)}\n" for one in ("beams-toy", "gates-toy"))
    page.write_text(f"before\n{marked}after\n")
    run(monkeypatch, "table", "--out", str(tmp_path / "out"), "--page", str(page))
    told = capsys.readouterr().out
    for row in ("n=2", "best_of=2", "`smcsd`, 2 particles", "2 independent samples, `draft-model`"):
        assert f"| {row} |" in told
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    # The draft model is the model: dsbd finds the beams of beam search.
    [found] = [line for line in text.splitlines() if line.startswith("| `dsbd` |")]
    assert found.endswith("| 3 of 3 |")
    assert "| `draft-model#fallback` |" in text
    results = [json.loads(file.read_text()) for file in (tmp_path / "out").glob("groups-*.json")]
    assert all(one["bases"]["n=2"] == "2 requests, one after the other" for one in results)


def test_gates_that_were_not_trained_are_left_out(study: list[str], tmp_path: Path) -> None:
    options = populations.read([*study, "--studies", "gates", "--gates", str(tmp_path / "gates")])
    assert {part.rows for part in populations.parts(options)} == {populations.GATE_ROWS}
    (tmp_path / "gates" / "bild").mkdir(parents=True)
    assert {part.rows for part in populations.parts(options)} == {(*populations.GATE_ROWS, "bild")}


def test_scores_are_of_prompts_that_have_an_answer(
    study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers.jsonl"
    rows = ({"prompt": "abc"}, {"prompt": "xyz", "answer": "7"})
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    study[study.index("--prompts") + 1] = str(answers)
    run(monkeypatch, *study, "--studies", "scores")
    run(monkeypatch, "table", "--out", str(tmp_path / "out"))
    told = capsys.readouterr().out
    assert "scores-toy" in told
    assert "toy, 1 prompts" in told
    [row] = [line for line in told.splitlines() if line.startswith("| `draft-model` |")]
    assert row.endswith("| 0 % of 1 | 1 |")


def test_prompts_are_needed(
    study: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = study.index("--prompts")
    with pytest.raises(SystemExit):
        run(monkeypatch, *study[:at], *study[at + 2 :])
    assert "give --prompts" in capsys.readouterr().err


def test_more_particles_are_nearer_to_the_target() -> None:
    few, many = particle_errors(1, 300, 0), particle_errors(24, 300, 0)
    assert many["answer_tv"] < 0.75 * few["answer_tv"]
    assert many["relative_rmse"] < 0.5 * few["relative_rmse"]
    low, high = many["tv_of_samples_range"]
    assert low < many["tv_of_samples"] < high
    low, high = many["relative_rmse_ci95"]
    assert low < many["relative_rmse"] < high

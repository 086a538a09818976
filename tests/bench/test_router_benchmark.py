"""benchmarks/router.py: what the router's priors are fitted to, and what its choices are compared with."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outpace
import router
from cli_support import toy
from outpace.methods.combination.aio.prompt_features import FEATURES
from outpace.targets.costs import FixedCosts

PROMPTS = [{"question_id": at, "category": "abc"[at % 2], "turns": ["ab" * (2 + at)]} for at in range(6)]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What three strategies did with six prompts on the toy model."""
    model = toy()
    model.target.costs = FixedCosts()
    monkeypatch.setattr(outpace, "load", lambda name, **_: model)
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in PROMPTS))
    words = f"router collect {file} --strategies none,sam,pld --length 24 --out {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    router.main()
    return out


def test_every_strategy_answers_every_prompt_and_half_of_each_task_is_held_out(answers: Path) -> None:
    records = router.read([answers])
    assert len(records) == 3 * len(PROMPTS)
    for task in "ab":
        held = {one["prompt"] for one in records if one["task"] == task and one["held_out"]}
        assert len(held) in (1, 2) and len({one["prompt"] for one in records if one["task"] == task}) == 3
    by_prompt = router.by(records, "prompt")
    assert all({one["strategy"] for one in found} == {"none", "sam", "pld"} for found in by_prompt.values())
    for one in records:
        assert one["accepted"] <= one["judged"] <= one["drafted"] and one["drafting"] <= one["rounds"]
        assert one["levels"] == one["drafted"] and len(one["features"]) == len(FEATURES)


def test_a_fit_is_written_for_every_kind_and_a_table_has_every_task(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "priors.json"
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    others = [
        one | {"strategy": name} for one in lines if one["strategy"] == "sam" for name in ("eagle3", "draft-model")
    ]
    answers.write_text("".join(json.dumps(one) + "\n" for one in [*lines, *others]))
    monkeypatch.setattr(sys, "argv", ["router", "fit", str(answers), "--out", str(out)])
    router.main()
    written = json.loads(out.read_text())
    assert written["features"] == list(FEATURES)
    for one in written["kinds"].values():
        assert all(len(one[figure]) == len(FEATURES) for figure in ("drafting", "nodes", "accepted"))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["router", "table", str(answers)])
    router.main()
    shown = capsys.readouterr().out
    assert all(f"| {task} |" in shown for task in ("a", "b", "all")) and "in hindsight" in shown


def test_a_kind_that_no_answer_shows_keeps_its_priors(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "priors.json"
    monkeypatch.setattr(sys, "argv", ["router", "fit", str(answers), "--out", str(out)])
    assert router.main() == 0
    known = json.loads(files("outpace.methods.combination.aio").joinpath("priors.json").read_text())["kinds"]
    written = json.loads(out.read_text())["kinds"]
    assert written["draft"] == known["draft"] and written["head"] == known["head"]
    assert written["lookup"] != known["lookup"]
    assert "no strategy of kind 'draft' has drafted" in capsys.readouterr().err


def test_a_table_of_one_prompt_has_nothing_held_out(
    answers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [line for line in answers.read_text().splitlines() if json.loads(line)["prompt"] == 0]
    answers.write_text("\n".join(first) + "\n")
    monkeypatch.setattr(sys, "argv", ["router", "table", str(answers)])
    assert router.main() == 0
    assert "no prompt was held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("table nowhere.jsonl", "nowhere.jsonl: there are no answers"),
        ("collect nowhere.txt --out out.jsonl", "nowhere.txt"),
        ("collect nowhere.txt --draft-model small --out out.jsonl", "--draft-name"),
    ],
)
def test_bad_input_is_one_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outpace, "load", lambda name, **_: toy())
    monkeypatch.setattr(sys, "argv", ["router", *words.split()])
    assert router.main() == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and said in shown and shown.count("\n") == 1


def test_weights_are_those_of_the_shares_and_the_constant_is_not_drawn_to_zero() -> None:
    rng = np.random.default_rng(2)
    slopes = np.array([0.3, -0.2, *[0.0] * 6])
    records: list[dict[str, Any]] = []
    for numbers in rng.random((400, 8)):
        share = 0.5 + float(numbers @ slopes)
        records.append({"features": [1.0, *numbers], "drafting": 1000 * share, "rounds": 1000})
    found = router.fitted(records, "drafting", "rounds")
    assert found == pytest.approx([0.5, *slopes], abs=0.03)


def test_a_ratio_is_of_all_tokens_over_all_seconds() -> None:
    ours = [{"tokens": 11, "seconds": 1.0}, {"tokens": 21, "seconds": 1.0}]
    others = [{"tokens": 11, "seconds": 2.0}, {"tokens": 21, "seconds": 2.0}]
    assert router.ratio(ours, others) == "2.00x [2.00, 2.00]"

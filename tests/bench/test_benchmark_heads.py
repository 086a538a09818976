"""benchmarks/heads.py: the figures of each head are kept beside that head, also of two heads of one kind."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from cli_support import toy
from outpace.heads.checkpoint import facts, new_head, save
from outpace.heads.head_folder import open_head
from outpace.heads.kinds import find_kind, plan
from outpace.heads.shipped import SHIPPED, measured
from outpace.methods.registry import drafting_with
from outpace.prompts.prompt import Prompt


def script() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "heads.py"
    spec = importlib.util.spec_from_file_location("heads_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_head_keeps_its_own_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads of one kind, two of them in folders of one name."""
    model = toy()
    monkeypatch.setattr(outpace, "load", lambda *_, **__: model, raising=False)
    folders = [tmp_path / name / "medusa" for name in ("one", "two", "three")]
    config = plan(find_kind("medusa"), facts(model.target, "toy"), size="tiny")
    for seed, folder in enumerate(folders):
        save(new_head(config, model.target, torch.arange(config.vocabulary), seed=seed), folder, {"tokens": seed})
    questions = tmp_path / "questions.txt"
    questions.write_text("a cat sat\nof it\n")
    out = tmp_path / "table"
    argv = [str(questions), *(word for folder in folders for word in ("--head", str(folder)))]
    monkeypatch.setattr(
        sys,
        "argv",
        ["heads.py", *argv, "--record", "--no-untrained", "--others", "--out", str(out), *("--threads", "1")],
    )
    script().main()

    [run] = json.loads(Path(f"{out}.json").read_text())["runs"]
    seconds = [row["draft_ms"] for row in run["drafters"] if row["drafter"].startswith("medusa")]
    assert len(set(seconds)) == len(seconds) == 12, "clocks tell whose row it is"
    for number, folder in enumerate(folders):
        about = json.loads((folder / "training.json").read_text())
        assert about["tokens"] == number
        kept = [row["draft_ms"] for row in about["measured"]["temperature 0"]["drafters"]]
        assert kept == seconds[4 * number : 4 * number + 4]
        assert measured(open_head(folder), "medusa") is not None


def test_figures_of_other_weights_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy()
    monkeypatch.setattr(outpace, "load", lambda *_, **__: model, raising=False)
    config = plan(find_kind("medusa"), facts(model.target, "toy"), size="tiny")
    save(new_head(config, model.target, torch.arange(config.vocabulary)), tmp_path / "head", {})
    found = outpace.evaluate_head(
        model, tmp_path / "head", [Prompt("1", "x", ("a cat sat",))], max_new_tokens=8, record=True
    )
    row = found["drafters"][1]
    assert measured(open_head(tmp_path / "head"), "medusa") == row["speedup"]
    assert row["head"]["folder"] == str(tmp_path / "head")
    about = (tmp_path / "head" / "training.json").read_bytes()
    other = new_head(config, model.target, torch.arange(config.vocabulary))
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    save(other, tmp_path / "head", {})
    (tmp_path / "head" / "training.json").write_bytes(about)
    assert measured(open_head(tmp_path / "head"), "medusa") is None


@pytest.mark.parametrize("folder", sorted(SHIPPED.iterdir()), ids=lambda folder: folder.name)
def test_the_shipped_heads_keep_figures_of_their_own_weights(folder: Path) -> None:
    record = json.loads((folder / "training.json").read_text())["measured"]["temperature 0"]
    assert record["weights"] == open_head(folder).files.fingerprint
    assert {row["method"] for row in record["drafters"]} == set(drafting_with(open_head(folder).kind))

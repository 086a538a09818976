"""outpace.bench.benchmark.bench: the bench as a function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import outpace.bench
import outpace.loading
from cli_support import toy
from outpace.bench.benchmark import bench
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.prompts.prompt import Prompt


def test_methods_by_name_with_their_settings(tmp_path: Path) -> None:
    report = bench(
        toy(),
        {"pld": {"length": 3}, "sam": {}},
        prompts=["abc abc", "xyz xyz"],
        max_new_tokens=12,
        params=SamplingParams(0.0),
    )
    assert report.complete
    assert [row["method"] for row in report.rows] == ["none", "pld", "sam"]
    assert json.loads(report.to_json()) == report.result
    settings = report.result["settings"]
    assert settings["method_settings"] == {"pld": {"num_draft_tokens": 3}, "sam": {}}
    assert (settings["prompts"], settings["temperature"], settings["command"]) == (2, 0.0, "")
    assert len(report.rows[1]["per_position_acceptance"]) <= 3
    assert "autoregressive decoding" in str(report)
    report.write_html(tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


def test_a_model_by_name_and_prompts_of_any_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(outpace.loading, "load", toy)
    file = tmp_path / "prompts.txt"
    file.write_text("abc abc\nxyz\n")
    by_file = bench("toy", [], prompts=file, limit=1, max_new_tokens=5)
    assert by_file.result["model"]["name"] == "toy"
    by_prompt = bench("toy", [], prompts=[Prompt("a", "qa", ("abc",)), "xyz", "uvw"], limit=2, max_new_tokens=5)
    assert by_prompt.result["settings"]["categories"] == ["qa", "other"]
    built = bench("toy", [toy().method("pld")], prompts=["abc"], max_new_tokens=5)
    assert [row["method"] for row in built.rows] == ["none", "pld"]


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(BadInput, match="unknown method"):
        bench(toy(), ["plx"], prompts=["abc"])
    with pytest.raises(BadInput, match="max_new_tokens"):
        bench(toy(), ["pld"], prompts=["abc"], max_new_tokens=0)
    with pytest.raises(BadInput, match="temperature"):
        bench(toy(), ["pld"], prompts=["abc"], params=SamplingParams(temperature=-1.0))
    with pytest.raises(BadInput, match="at least one prompt"):
        bench(toy(), ["pld"], prompts=[])


def test_the_package_is_the_function() -> None:
    package: Any = outpace.bench
    assert [row["method"] for row in package(toy(), ["pld"], prompts=["abc"], max_new_tokens=5).rows] == ["none", "pld"]

"""What engines and checks ask of the head that comes with the package, with the embedded model."""

import json
from pathlib import Path

import pytest

import outpace.loading
from cli_support import Run, runner
from outpace.heads.head_config import WEIGHTS
from outpace.heads.shipped import SHIPPED


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    real = outpace.loading.load
    made = runner(monkeypatch, capsys)
    monkeypatch.setattr(outpace.loading, "load", real)
    return made


def test_the_shipped_head_is_exported_as_eagle_has_it(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = run("export-head", "eagle3", "--layout", "eagle", "--model", "smollm2", "--out", str(out))
    assert ran.code == 0, ran
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["fc_norm"] is True and config["norm_output"] is True


def test_the_shipped_head_is_measured_by_its_kind(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["Why is the sky blue?"]}))
    ran = run("eval-head", "eagle3", "--prompts", str(prompts), "-n", "8", "--method", "eagle3", "--json")
    assert ran.code == 0, ran
    assert json.loads(ran.out)["head"]["kind"] == "eagle3"


def test_a_bench_with_60_nodes_drafts_trees_of_60(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["Why is the sky blue?"]}))
    trace = tmp_path / "trace.jsonl"
    common = ("bench", "--model", "smollm2", "--methods", "eagle3", "--prompts", str(prompts), "-n", "8")
    ran = run(*common, "--param", "eagle3.max_nodes=60", "--trace", str(trace))
    assert ran.code == 0, ran
    requests = [one for one in map(json.loads, trace.read_text().splitlines()) if one.get("method") == "eagle3"]
    assert {count for one in requests for count in one["rounds"]["drafted"]} == {60}


@pytest.mark.parametrize("folder", sorted(SHIPPED.iterdir()), ids=lambda one: one.name)
def test_a_shipped_head_takes_12_megabytes_at_most(folder: Path) -> None:
    assert (folder / WEIGHTS).stat().st_size <= 12e6

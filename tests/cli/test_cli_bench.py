"""outpace bench, on a toy model: the JSON contract, files that are whole or not there, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli_support import Run, refused
from test_cli_generate import press

ROW = {
    "method", "lossless", "prompts", "tokens", "seconds", "tokens_per_second", "decode_tokens_per_second", "ttft_ms",
    "speedup", "speedup_ci95", "mean_acceptance_length", "acceptance_rate", "per_position_acceptance", "identical",
    "drafting_rounds", "drafting_acceptance_length", "draft_ms", "drafting_parts", "caches", "time_split",
    "peak_memory_mb", "error", "by_category",
}  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"abc abc {name}", "category": group} for name in "pq" for group in ("one", "two")]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def strict(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def test_json_is_the_contract(cli: Run, prompts: str, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    common = ["--prompts", prompts, "--max-new-tokens", "12", "--limit", "3", "--threads", "1"]
    ran = cli("bench", "--methods", "pld,sam", *common, "--json", str(out), "--html", str(page))
    assert ran.code == 0, ran.err
    found = strict(out.read_text())
    assert {"version", "complete", "machine", "model", "settings", "methods"} <= set(found)
    assert found["complete"] is True
    assert [row["method"] for row in found["methods"]] == ["none", "pld", "sam"]
    for row in found["methods"]:
        assert set(row) >= ROW
        assert row["prompts"] == 3
        assert sum(row["time_split"].values()) == pytest.approx(1)
        assert row["identical"]["same"] == 3
        assert set(row["by_category"]) == {"one", "two"}
    assert found["methods"][0]["mean_acceptance_length"] == 1
    assert "pld" in ran.out
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    assert stat.S_IMODE(out.stat().st_mode) & 0o600 == 0o600
    assert not list(tmp_path.glob(".*.tmp"))


def test_json_on_standard_output_is_alone(cli: Run, prompts: str) -> None:
    ran = cli("bench", "--prompts", prompts, "--methods", "pld", "-n", "6", "--temperature", "1", "--json", "-")
    assert ran.code == 0
    assert all(row["identical"] is None for row in strict(ran.out)["methods"])
    assert "pld" in ran.err


def test_parameters_reach_their_methods(cli: Run, prompts: str) -> None:
    ran = cli(
        "bench", "--prompts", prompts, "--methods", "pld,sam,pld", "-n", "6", "--json", "-", "--batch-size", "2",
        "--param", "length=3", "--param", "sam.length=5",
    )  # fmt: skip
    found = strict(ran.out)
    assert [row["method"] for row in found["methods"]] == ["none", "pld", "sam"]
    chosen = found["settings"]["method_settings"]
    assert {name: list(settings.values()) for name, settings in chosen.items()} == {
        "none": [], "pld": [3], "sam": [5],
    }  # fmt: skip
    assert all(len(row["per_position_acceptance"]) <= 5 for row in found["methods"])


def test_a_setting_may_name_its_method_by_an_alias(cli: Run, prompts: str) -> None:
    common = ["--prompts", prompts, "-n", "4", "--limit", "1", "--json", "-", "--param", "prompt-lookup.length=6"]
    for chosen in ("prompt-lookup", "pld", "sam,ngram"):
        ran = cli("bench", "--methods", chosen, *common)
        assert ran.code == 0, ran.err
        assert list(strict(ran.out)["settings"]["method_settings"]["pld"].values()) == [6]


def test_an_output_that_exists_is_replaced_whole(cli: Run, prompts: str, tmp_path: Path) -> None:
    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("old")
    link.symlink_to(old)
    assert cli("bench", "--prompts", prompts, "--methods", "none", "-n", "3", "--json", str(link)).code == 0
    assert link.is_symlink()
    assert strict(old.read_text())["complete"]
    assert cli("bench", "--prompts", prompts, "--methods", "none", "-n", "3", "--json", os.devnull).code == 0
    assert not Path(os.devnull).is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_device_stays_what_it_is(cli: Run, prompts: str, tmp_path: Path, option: str) -> None:
    (tmp_path / "link").symlink_to("/dev/full")
    for place in (Path("/dev/full"), tmp_path / "link"):
        refused(
            cli("bench", "--prompts", prompts, "--methods", "none", "-n", "3", option, str(place)),
            f"cannot write {place}: No space left on device",
        )
        assert place.is_char_device()
    assert [path.name for path in Path("/dev").glob(".full.*")] == []


@pytest.mark.parametrize("at", [1, 60])
def test_ctrl_c_leaves_valid_partial_json(
    cli: Run, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    press(monkeypatch, at)
    out = tmp_path / "out.json"
    argv = ["bench", "--prompts", prompts, "--methods", "pld", "-n", "20", "--html", str(tmp_path / "o.html")]
    ran = cli(*argv, "--json", str(out))
    assert ran.code == 130, ran
    assert "Traceback" not in ran.err
    found = strict(out.read_text())
    assert found["complete"] is False
    assert {"version", "machine", "model", "settings", "methods"} <= set(found)


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts a background job
sys.path.insert(0, {tests!r})
import outpace.loading
from cli_support import toy
from outpace.cli import main

def load(name, **_):
    model = toy(name)
    score = model.target.score
    def slow(*args, **options):
        print("scoring", file=sys.stderr, flush=True)
        time.sleep(0.05)
        return score(*args, **options)
    model.target.score = slow
    return model

outpace.loading.load = load
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("command", ["bench", "generate"])
def test_ctrl_c_in_a_process_of_its_own(command: str, prompts: str) -> None:
    """Even as a shell's background job, for which SIGINT is ignored when it starts."""
    argv = {"bench": ["--prompts", prompts, "--methods", "none", "--json", "-"], "generate": ["abc", "--json"]}[command]
    code = SLOW.format(tests=str(Path(__file__).parents[1]))
    with subprocess.Popen(
        [sys.executable, "-c", code, command, "--model", "toy", *argv, "-n", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        while "scoring" not in process.stderr.readline():
            pass
        time.sleep(0.4)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert strict(out)["complete"] is False

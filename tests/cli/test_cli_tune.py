"""outpace tune: a file that is complete after every try, that --resume continues, and that draft-verify reads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import outpace.loading
from cli_support import Run, refused, runner, toy
from outpace.drafting.layer_skips import read_skips

tune = importlib.import_module("outpace.cli.tune")  # the package's attribute of this name is the command
SHORT = ("--limit", "2", "-n", "12", "--length", "3")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("a cat sat\nthe end of it\n")
    return file


def test_what_is_found_is_kept_and_used(run: Run, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "skips.json"
    ran = run("tune", "dv", "--prompts", str(prompts), "--out", str(file), "--trials", "6", *SHORT)
    assert ran.code == 0, ran
    assert "x the speed of autoregressive decoding expected, after 6 sets" in ran.out
    assert f"skips={file}" in ran.out.replace("\n", "")
    record = json.loads(file.read_text())
    assert len(record["trials"]) == 6
    best = max(record["trials"], key=lambda trial: trial["tokens_per_second"])
    assert record["tokens_per_second"] == best["tokens_per_second"]
    read_skips(file).check(toy().target)
    used = run("generate", "a dog", "--method", "dv", "--param", f"skips={file}", "-n", "8", "--json")
    assert used.code == 0, used
    plain = run("generate", "a dog", "--method", "none", "-n", "8", "--json")
    assert json.loads(used.out)["text"] == json.loads(plain.out)["text"]


def test_a_search_is_continued(run: Run, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "skips.json"
    command = ("tune", "dv", "--prompts", str(prompts), "--out", str(file), *SHORT)
    run(*command, "--trials", "4")
    first = json.loads(file.read_text())
    ran = run(*command, "--resume", "--trials", "7", "--json")
    assert json.loads(ran.out)["trials"] == 7
    record = json.loads(file.read_text())
    assert record["trials"][:4] == first["trials"]
    assert record["costs"] == first["costs"]
    done = file.read_text()
    assert run(*command, "--resume", "--trials", "7").code == 0
    assert file.read_text() == done
    refused(run(*command, "--resume", "--trials", "8", "--seed", "1"), "another seed")


def test_an_interrupt_keeps_what_was_found(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "skips.json"
    write, count = tune.write_whole, 0

    def interrupted(*arguments: object) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(tune, "write_whole", interrupted)
    command = ("tune", "dv", "--prompts", str(prompts), "--out", str(file), "--trials", "9", *SHORT)
    ran = run(*command)
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == f"interrupted: 3 of 9 sets done, kept in {file}; continue with --resume"
    assert len(json.loads(file.read_text())["trials"]) == 3
    monkeypatch.setattr(tune, "write_whole", write)
    refused(run(*command), "continue it with --resume")
    assert run(*command, "--resume").code == 0
    assert len(json.loads(file.read_text())["trials"]) == 9


def test_bad_input_is_said_in_one_line(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the options were checked")

    monkeypatch.setattr(outpace.loading, "load", no_model)
    file = tmp_path / "skips.json"
    refused(run("tune", "pld", "--out", str(file)), "'pld' cannot be tuned")
    refused(run("tune", "dv", "--out", str(file), "--prompts", "structured"), "tune decodes without grammars")
    refused(run("tune", "dv", "--out", str(tmp_path / "no" / "x.json")), "no folder")
    refused(run("tune", "dv", "--out", str(file), "--trials", "0"), "--trials")
    refused(run("tune", "dv", "--out", str(file), "--length", "0"), "--num-draft-tokens")
    refused(run("tune", "dv", "--out", str(file), "--prompts", str(tmp_path / "none.txt")), "none.txt")
    refused(run("tune", "dv", "--out", str(prompts), "--prompts", str(prompts)), "not JSON")
    file.write_text("{}")
    refused(run("tune", "dv", "--out", str(file)), "not a file of skips")

"""--head and the default method on the command line, with an untrained head for the toy model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import outpace
from cli_support import Run, refused, toy
from outpace.heads.checkpoint import facts, new_head, save
from outpace.heads.kinds import find_kind, plan

PROMPT = "abcabcabc"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head of the toy model that has learned nothing."""
    target = toy().target
    config = plan(find_kind("eagle3"), facts(target, "toy"), size="tiny")
    folder = tmp_path_factory.mktemp("heads") / "eagle3"
    save(new_head(config, target, torch.arange(config.vocabulary)), folder, {})
    return str(folder)


def test_a_method_drafts_with_the_head_that_is_named(cli: Run, head: str) -> None:
    plain = json.loads(cli("generate", PROMPT, "--method", "none", "-n", "12", "--json").out)
    for method, more in (("eagle3", ["--param", "nodes=3"]), ("auto", [])):
        argv = ["--method", method, *more, "--head", head, "-n", "12", "--json"]
        told = json.loads(cli("generate", PROMPT, *argv).out)
        assert told["tokens"] == plain["tokens"]
        assert method == "auto" or told["metrics"]["drafting_rounds"] > 0
    assert set(told["metrics"]["drafting_parts"]) == {"sam", "eagle3"}
    refused(cli("generate", PROMPT, "--method", "eagle3"), "--head FOLDER")
    refused(cli("generate", PROMPT, "--method", "medusa", "--head", head), "--head gave eagle3")


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"], ["bench"], ["certify", "auto", "--level", "greedy"]])
def test_a_folder_without_a_head_is_refused_before_anything_is_loaded(
    cli: Run, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outpace.loading, "load", lambda name, **_: pytest.fail("loaded"))
    refused(cli(*command, "--head", "nowhere"), "no such folder")


def test_auto_is_what_generates_and_it_says_who_drafted(cli: Run, head: str) -> None:
    told = json.loads(cli("generate", PROMPT, "-n", "20", "--json").out)
    assert (told["metrics"]["method"], set(told["metrics"]["drafting_parts"])) == ("auto", {"sam"})
    shown = cli("generate", PROMPT, "-n", "30", "--explain", "--head", head).out
    assert re.search(r"Drafted by: sam in \d+, eagle3 in \d+ of \d+ rounds", shown)
    assert "Drafted by" not in cli("generate", PROMPT, "-n", "20", "--explain", "--method", "sam").out


def test_a_chat_keeps_what_the_head_reads(cli: Run, head: str) -> None:
    lines = "one\ntwo\nthree\n"
    ran = cli("chat", "-n", "12", "--head", head, stdin=lines)
    assert ran.out == cli("chat", "-n", "12", "--method", "none", stdin=lines).out
    kept = re.findall(r"(\d+) of (\d+) prompt tokens reused", ran.err)
    assert len(kept) == 2
    for reused, prompt in kept:
        assert 0 < int(prompt) - int(reused) <= len("u three\na ") + 2


def test_a_bench_measures_auto_and_shows_its_parts(cli: Run, head: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc abc abc\n")
    page = tmp_path / "page.html"
    common = ["--prompts", str(prompts), "-n", "12", "--head", head]
    ran = cli("bench", *common, "--json", "-", "--html", str(page))
    found = json.loads(ran.out)
    assert [row["method"] for row in found["methods"]] == ["none", "pld", "sam", "auto"]
    assert set(found["methods"][-1]["drafting_parts"]) == {"sam", "eagle3"}
    assert found["methods"][2]["drafting_parts"] == {}
    assert found["settings"]["heads"] == [head]
    assert re.search(r"sam \d+ % \+ eagle3 \d+ %", page.read_text())
    assert re.search(r"sam \d+ % \+ eagle3 \d+ %", cli("bench", *common, "--methods", "auto").out)


def test_certification_takes_the_head(cli: Run, head: str) -> None:
    ran = cli("certify", "auto", "--level", "greedy", "--limit", "1", "--head", head)
    assert ran.code == 0, ran.err
    assert "untrained" not in ran.out


def test_python_takes_heads_and_remembers_them(head: str) -> None:
    model = toy()
    plain = outpace.generate(model, PROMPT, method="none", max_new_tokens=20)
    for _ in range(2):
        found = outpace.generate(model, PROMPT, head=head, namespace="ours", max_new_tokens=20)
        assert found.tokens == plain.tokens
        assert set(found.metrics["drafting_parts"]) == {"sam", "eagle3"}
    assert set(outpace.generate(model, PROMPT, max_new_tokens=9, namespace="ours").metrics["drafting_parts"]) == {"sam"}
    assert len(model.learned) == 3, "none, auto with the head, and auto without"

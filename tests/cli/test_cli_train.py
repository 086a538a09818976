"""outpace train: from prompts to a head that decodes, through the command line; stopped, resumed, refused."""

import importlib
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outpace.loading
from cli_support import Run, refused, runner, toy
from outpace.controllers.fixed import Fixed
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.heads.head_config import CONFIG, PROVENANCE, WEIGHTS
from outpace.training.dataset import held_out
from outpace.training.job import kind_and_method
from outpace.training.run_state import STATE, read_state
from outpace.training.shards import Shards
from outpace.training.trainer import Trainer
from outpace.training.trial import Trial

TOY = toy()
SMALL = ("--tokens", "500", "--size", "tiny")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    made = runner(monkeypatch, capsys)
    monkeypatch.setattr(outpace.loading, "load", lambda name, **_: TOY)  # one for all: its tables are drawn once
    return made


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    names = ["cat", "dog", "owl", "fox", "bee", "ant", "elk", "hen"]
    rows = [{"turns": [f"what did the {one} say to the {other}"]} for one in names for other in names if one != other]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_head_is_trained_and_drafts(run: Run, prompts: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    ran = run("train", "eagle3", "--prompts", str(prompts), "--out", str(head), *SMALL, "--param", "steps=2")
    assert ran.code == 0, ran
    assert f"head: {head}" in ran.out
    assert "tokens of" in ran.err
    assert {CONFIG, WEIGHTS, PROVENANCE, STATE, "data"} == {path.name for path in head.iterdir()}
    made = json.loads((head / PROVENANCE).read_text())
    assert made["command"].startswith("outpace train eagle3 --model toy --tokens 500 --prompts prompts.jsonl")
    assert made["data"]["answer_tokens"] == Shards(head / "data", {}).answer_tokens() >= 500
    assert made["data"]["sources"].keys() <= {"prompts.jsonl", "self"}
    assert made["steps"] > 0 < made["tokens"]
    assert made["machine"]["torch"]
    assert json.loads((head / CONFIG).read_text())["options"]["steps"] == 2
    method = TOY.method("eagle3", {"max_nodes": 3}, head=head)
    said = outpace.generate(TOY, "a cat", method=method, max_new_tokens=16)
    assert said.tokens == outpace.generate(TOY, "a cat", method="none", max_new_tokens=16).tokens
    assert said.metrics["drafting_rounds"] > 0.5


@pytest.mark.parametrize("accepted", [0.0, 0.2, 0.5])
def test_a_head_is_recommended_if_the_target_accepts_what_it_drafts(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: float
) -> None:
    head, job = tmp_path / "head", importlib.import_module("outpace.training.job")
    monkeypatch.setattr(job, "try_head", lambda *_: Trial(accepted, 4, 3))
    ran = run("train", "medusa", "--prompts", str(prompts), "--out", str(head), *SMALL)
    assert ran.code == 0, ran
    assert f"{accepted:.2f} of 4 draft tokens accepted per round on 3 prompts" in ran.out
    assert (f"--method medusa --head {head}" in ran.out) is (accepted == 0.5)
    assert ("no speed-up yet" in ran.out) is (accepted < 0.5)
    assert ("more data (--tokens, --max-minutes, --prompts)" in ran.out) is (accepted < 0.5)
    assert json.loads((head / PROVENANCE).read_text())["trial"]["gains"] is (accepted == 0.5)


def test_a_trial_counts_what_is_accepted(prompts: Path, tmp_path: Path) -> None:
    made = outpace.train(TOY, "medusa", tmp_path / "head", prompts=[prompts], tokens=500, size="tiny")
    trial = made.provenance["trial"]
    assert trial["draft_tokens"] == 4 and 1 <= trial["prompts"] <= 4
    shards, method = Shards(tmp_path / "head" / "data", {}), TOY.method("medusa", head=made.folder)
    method = replace(method, controller=Fixed(4, 1, 4))
    asked = [one for path in shards.paths for one in shards.read(path, wanted=held_out)][:4]
    asked = asked or [one for path in shards.paths for one in shards.read(path)][:4]
    rounds = accepted = 0
    for one in asked:
        decoder = Decoder(TOY.target)
        alone = decoder.submit(Request(tuple(one.prompt), method, max_new_tokens=32, stop_ids=TOY.eos_ids))
        decoder.run()
        rounds, accepted = rounds + alone.metrics.rounds, accepted + alone.metrics.accepted
    assert trial["accepted"] == pytest.approx(accepted / rounds, abs=0.001)
    assert trial["gains"] is (accepted / rounds >= 0.25)


def test_without_prompts_the_model_writes_them_and_data_are_shared(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "shared"
    common = ("--data", str(data), "--json", *SMALL)
    first = run("train", "medusa", "--out", str(tmp_path / "a"), *common)
    assert first.code == 0, first
    assert json.loads(first.out)["data"]["sources"].keys() == {"self"}
    kept = {path.name: path.read_bytes() for path in data.iterdir()}
    second = run("train", "eagle3", "--out", str(tmp_path / "b"), *common, "--rank", "4", "--max-minutes", "5")
    assert second.code == 0, second
    assert {path.name: path.read_bytes() for path in data.iterdir()} == kept
    config = json.loads((tmp_path / "b" / CONFIG).read_text())
    assert (config["rank"], config["vocabulary"]) == (4, TOY.target.vocab_size)
    assert "--max-minutes 5" in json.loads(second.out)["command"]
    assert not (tmp_path / "b" / "data").exists()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_training_is_interrupted_and_resumed(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    command: tuple[str, ...] = (
        "train",
        "eagle3",
        "--prompts",
        str(prompts),
        "--epochs",
        "3",
        "--param",
        "steps=1",
        *SMALL,
    )
    whole, head = tmp_path / "whole", tmp_path / "head"
    assert run(*command, "--out", str(whole)).code == 0
    command = (*command, "--out", str(head))
    step = Trainer._step

    def pressed(self: Trainer, batch: object) -> None:
        step(self, batch)  # type: ignore[arg-type]
        if self.progress.step == 2:
            signal.raise_signal(by)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", pressed)
        ran = run(*command)
    assert ran.code == 130
    assert ran.err.splitlines()[-1].startswith("interrupted: 2 of ")
    assert ran.err.splitlines()[-1].endswith(f" steps done, kept in {head}; continue with --resume")
    assert not (head / WEIGHTS).exists()
    refused(run(*command), "holds a run already", "--resume")
    ran = run(*command, "--resume")
    assert ran.code == 0, ran
    assert (head / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    before = read_state(head)
    again = run(*command, "--resume")  # nothing is left to do: the same head once more
    assert again.code == 0, again
    assert (head / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert before is not None
    assert before["progress"]["step"] == read_state(head)["progress"]["step"]  # type: ignore[index]
    other = run(*command, "--resume", "--param", "decay=0.5")
    assert (other.code, other.out) == (2, "")
    assert "other settings" in other.err.splitlines()[-1]


def test_collecting_is_interrupted_and_resumed(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = importlib.import_module("outpace.training.data")
    monkeypatch.setattr(data, "BLOCK", 4)
    monkeypatch.setattr(data, "_LEAST_BLOCK", 4)
    head = tmp_path / "head"
    command = ("train", "medusa", "--prompts", str(prompts), "--out", str(head), *SMALL[2:], "--tokens", "1000")
    append, count = Shards.append, 0

    def interrupted(*arguments: Any, **more: Any) -> object:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return append(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Shards, "append", interrupted)
        ran = run(*command)
    assert ran.code == 130
    assert f"tokens done, kept in {head / 'data'}; continue with --resume" in ran.err
    kept = Shards(head / "data", {}).keys()
    assert len(kept) == 4
    assert run(*command, "--resume").code == 0
    assert Shards(head / "data", {}).keys()[:4] == kept


def test_a_full_disk_and_memory_are_said_in_one_line(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tmp_path / "head"
    command = ("train", "medusa", "--prompts", str(prompts), "--out", str(head), *SMALL)

    def starved(*_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_losses", starved)
        ran = run(*command)
    assert (ran.code, ran.out) == (2, "")
    assert "error: memory ran out in training; the saved state is kept" in ran.err
    checkpoint = importlib.import_module("outpace.heads.checkpoint")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        ran = run(*command)
    assert (ran.code, ran.out) == (2, "")
    assert "No space left" in ran.err.splitlines()[-1]
    assert run(*command, "--resume").code == 0


def test_names_of_methods_stand_for_the_heads_they_use() -> None:
    from outpace.heads.kinds import kinds

    for named in ("eagle2", "ddtree", "distill"):
        kind, method = kind_and_method(named)
        assert kind in kinds()
        assert method == named
    assert kind_and_method("draft-lm") == ("draft-lm", "distill")
    assert kind_and_method("nonesuch")[0] == "nonesuch"


def test_eagle2_is_trained_as_eagle(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(outpace.loading, "load", nothing)
    ran = run("train", "eagle2", "--out", str(tmp_path / "head"))
    assert ran.code == 130
    assert "eagle2 drafts with a head of kind eagle" in ran.err


def test_bad_input_is_said_in_one_line(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the options were checked")

    monkeypatch.setattr(outpace.loading, "load", no_model)
    out = ("--out", str(tmp_path / "head"))
    refused(run("train", "eagle9", *out), "unknown kind of head 'eagle9'; did you mean 'eagle'")
    refused(run("train", "eagle3", *out, "--size", "vast"), "unknown size 'vast'", "tiny")
    refused(run("train", "eagle3", *out, "--param", "stepz=2"), "stepz", "steps")
    refused(run("train", "eagle3", *out, "--param", "steps=none"), "steps")
    refused(run("train", "eagle3", *out, "--tokens", "0"), "--tokens must be at least 1")
    refused(run("train", "eagle3", *out, "--epochs", "0"), "--epochs must be above 0")
    refused(run("train", "eagle3", *out, "--max-minutes", "-1"), "--max-minutes must be above 0")
    refused(run("train", "eagle3", *out, "--rank", "-1"), "--rank")
    refused(run("train", "eagle3", *out, "--self-written", "2"), "--self-written must be between 0 and 1")
    refused(run("train", "eagle3", *out, "--self-written", "0"), "leaves no prompts")
    refused(run("train", "eagle3", *out, "--readings", "1"), "--passages must be at least 0 and below 1")
    refused(run("train", "eagle3", *out, "--cache-bytes", "-1"), "--cache-bytes")
    refused(run("train", "eagle3", *out, "--turns", "0"), "--turns must be at least 1")
    refused(run("train", "eagle3", *out, "--answer-tokens", "0"), "--answer-tokens must be at least 1")
    refused(run("train", "eagle3", *out, "--row-tokens", "8"), "--row-tokens must be at least")
    refused(run("train", "eagle3", *out, "--state-bits", "7"), "--state-bits must be 8 or 16")
    refused(run("train", "eagle3", *out, "--texts", str(tmp_path / "none.jsonl")), "cannot read passages", "none.jsonl")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "the cat went home"}')
    refused(run("train", "eagle3", *out, "--texts", str(texts), "--passages", "0"), "leave one of them out")
    refused(run("train", "eagle3", *out, "--param", "start_weight=0.5"), "start_weight")
    both = ("--param", "start_weight=2", "--param", "later_rows=0.5")
    refused(run("train", "eagle3", *out, *both), "start_weight needs all rows unrolled")
    refused(run("train", "eagle3", *out, "--param", "replay=0.5", "--param", "steps=1"), "replay needs steps")
    refused(run("train", "eagle3", *out, "--states", "a", "--data", "b"), "give one of them")
    refused(run("train", "eagle3", *out, "--prompts", str(tmp_path / "none.jsonl")), "none.jsonl")
    refused(run("train", "eagle3", *out, "--exclude", str(tmp_path / "none.txt")), "none.txt")
    refused(run("train", "eagle3", "--out", str(prompts)), "prompts.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"label": 3}')
    refused(run("train", "eagle3", *out, "--prompts", str(bad)), "no usable rows", "label")
    done = tmp_path / "done"
    done.mkdir()
    (done / WEIGHTS).write_bytes(b"")
    refused(run("train", "eagle3", "--out", str(done)), "holds a head already")


def test_a_head_is_trained_where_drafts_fail_on_whole_conversations(run: Run, prompts: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    rows = [{"text": f"the {one} went home and slept well"} for one in ("cat", "dog", "owl", "fox")]
    texts.write_text("\n".join(map(json.dumps, rows)))
    settings = ("start_weight=4", "replay=0.5", "loss=lk", "qk_norm=true", "steps=3")
    head = tmp_path / "head"
    ran = run(
        *("train", "eagle3", "--prompts", str(prompts), "--texts", str(texts), "--out", str(head)),
        *("--tokens", "1500", "--size", "tiny", "--batch-tokens", "300", "--accumulate", "2", "--prefetch", "1"),
        *("--state-bits", "8", "--evaluate-tokens", "50", "--answer-tokens", "60", "--json"),
        *(word for one in settings for word in ("--param", one)),
    )
    assert ran.code == 0, ran
    made = json.loads(ran.out)
    assert "--texts texts.jsonl --answer-tokens 60 --state-bits 8 --batch-tokens 300" in made["command"]
    assert "--evaluate-tokens 50 --accumulate 2 --prefetch 1" in made["command"]
    assert "read" in made["data"]["sources"]
    assert made["steps"] > 1
    if made["held_out"]:
        assert made["held_out"]["round_tokens"] >= 1.0
    method = TOY.method("eagle3", {"max_nodes": 3}, head=head)
    said = outpace.generate(TOY, "a cat", method=method, max_new_tokens=16)
    assert said.tokens == outpace.generate(TOY, "a cat", method="none", max_new_tokens=16).tokens
    refused(
        run("export-head", str(head), "--layout", "eagle", "--model", "toy", "--out", str(tmp_path / "out")), "qk_norm"
    )
    again = run("train", "eagle3", "--out", str(head), "--data", str(head / "data"), "--tokens", "1500", "--resume")
    assert again.code == 2
    assert "is of a run with other settings" in again.err.splitlines()[-1]

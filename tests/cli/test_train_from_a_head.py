"""outpace train --from: a trained head is gone on from with its weights alone, and kept unless others are better."""

import itertools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import outpace.loading
from cli_support import Run, refused, runner, toy
from outpace.heads.head_config import CONFIG, PROVENANCE, WEIGHTS
from outpace.training.trainer import Trainer

TOY = toy()
WORDS = 16


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    made = runner(monkeypatch, capsys)
    monkeypatch.setattr(outpace.loading, "load", lambda name, **_: TOY)
    return made


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that was trained for a while, with its data beside it."""
    folder = tmp_path_factory.mktemp("first")
    prompts = folder / "prompts.jsonl"
    names = ["cat", "dog", "owl", "fox", "bee", "ant", "elk", "hen"]
    rows = [{"turns": [f"what did the {one} say to the {other}"]} for one in names for other in names if one != other]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    outpace.train(
        TOY, "eagle3", folder / "head", prompts=[prompts], tokens=600, size="tiny", vocabulary=WORDS,
        options={"steps": 2}, passages=0.0, batch_tokens=150,
    )  # fmt: skip
    return folder / "head"


def going_on(head: Path, out: Path, *more: str) -> tuple[str, ...]:
    common = ("--data", str(head / "data"), "--tokens", "600", "--batch-tokens", "150", "--evaluate-tokens", "0")
    return ("train", "eagle3", "--from", str(head), "--out", str(out), *common, *more)


def weights(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / WEIGHTS))


def test_its_weights_remain_the_head_unless_others_are_better(
    run: Run, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = itertools.count(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_held_out", lambda _: {"loss": next(losses)})
        ran = run(*going_on(head, tmp_path / "b", "--rate", "0.001", "--param", "loss=lk", "--json"))
    assert ran.code == 0, ran
    made = json.loads(ran.out)
    assert made["steps"] > 0
    assert made["history"][0] == [0, 1.0]
    before, after = weights(head), weights(tmp_path / "b")
    assert before.keys() == after.keys()
    assert all((before[name] == value).all() for name, value in after.items())
    old = json.loads((head / CONFIG).read_text())
    new = json.loads((tmp_path / "b" / CONFIG).read_text())
    assert new["options"] == old["options"] | {"loss": "lk"}
    assert {**new, "options": 0} == {**old, "options": 0}
    first = json.loads((head / PROVENANCE).read_text())
    assert made["from"]["spent"] == {name: pytest.approx(first[name]) for name in ("steps", "tokens", "seconds")}
    assert "--from head --rate 0.001" in made["command"]


def test_it_learns_on_and_a_third_run_counts_both(run: Run, head: Path, tmp_path: Path) -> None:
    more = ("--vocabulary", str(WORDS + 6), "--json")
    ran = run(*going_on(head, tmp_path / "b", *more))
    assert ran.code == 0, ran
    second = json.loads(ran.out)
    old, new = weights(head), weights(tmp_path / "b")
    assert (old["fc.weight"] != new["fc.weight"]).any() or min(second["history"], key=lambda one: one[1])[0] == 0
    assert set(old["draft_vocabulary.d2t"].tolist()) < set(new["draft_vocabulary.d2t"].tolist())
    assert json.loads((tmp_path / "b" / CONFIG).read_text())["vocabulary"] == WORDS + 6
    ran = run(*going_on(tmp_path / "b", tmp_path / "c", "--data", str(head / "data"), "--json"))
    assert ran.code == 0, ran
    third = json.loads(ran.out)
    assert third["from"]["spent"]["steps"] == second["steps"] + second["from"]["spent"]["steps"]


def test_a_stopped_run_goes_on_with_its_own_state(
    run: Run, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step

    def stopped(self: Trainer, batch: object) -> None:
        step(self, batch)  # type: ignore[arg-type]
        if self.progress.step == 2:
            signal.raise_signal(signal.SIGINT)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*going_on(head, whole)).code == 0
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopped)
        assert run(*going_on(head, parts)).code == 130
    assert run(*going_on(head, parts, "--resume")).code == 0
    one, other = weights(whole), weights(parts)
    assert all((other[name] == value).all() for name, value in one.items())


def test_a_run_is_gone_on_with_as_it_began(run: Run, head: Path, tmp_path: Path) -> None:
    assert run(*going_on(head, tmp_path / "b")).code == 0
    kept = (tmp_path / "b" / PROVENANCE).read_bytes()
    refused(run(*going_on(head, tmp_path / "b", "--resume", "--seed", "5")), "a run with --seed 0", "or another --out")
    _, kind, _, _, *rest = going_on(head, tmp_path / "b", "--size", "tiny", "--vocabulary", str(WORDS), "--resume")
    refused(run("train", kind, *rest, "--param", "steps=2"), "a run that began from another head; give the same --from")
    assert (tmp_path / "b" / PROVENANCE).read_bytes() == kept


def test_provenance_that_another_program_wrote_is_no_obstacle(run: Run, head: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(head, mine, ignore=shutil.ignore_patterns("trainer.pt", "data"))
    for odd in (
        {"from": "a folder", "steps": "many"},
        {"from": {"spent": [1]}, "tokens": None, "seconds": float("nan")},
    ):
        (mine / PROVENANCE).write_text(json.dumps(odd))
        out = tmp_path / str(len(odd))
        ran = run(*going_on(mine, out, "--data", str(head / "data"), "--json"))
        assert ran.code == 0, ran
        assert set(json.loads(ran.out)["from"]["spent"].values()) == {0.0}


def test_what_does_not_fit_is_said_in_one_line(run: Run, head: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(run(*going_on(head, head)), "holds a run already")
    for size in ("large", "base"):
        refused(run(*going_on(head, out, "--size", size)), f"is not of --size {size}; leave --size out")
    refused(run(*going_on(head, out, "--vocabulary", "8")), f"drafts {WORDS} tokens; --vocabulary must be at least")
    refused(run(*going_on(head, out, "--rank", "3")), "has an LM head of rank 0, not 3")
    refused(run(*going_on(head, out, "--param", "qk_norm=true")), "has other weights than these settings ask for")
    refused(run("train", "medusa", "--from", str(head), "--out", str(out)), "is a head of kind eagle3, and medusa")
    refused(run("train", "eagle3", "--from", str(tmp_path / "none"), "--out", str(out)), "no such folder")
    refused(run("train", "eagle3", "--from", "eagle3", "--out", str(out)), "no head of this kind is shipped for")
    refused(run(*going_on(head, out, "--rate", "0")), "--rate must be above 0 and at most 1")


def test_an_lm_head_of_its_own_is_trained_on(
    run: Run, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As heads have that were trained elsewhere: its rows are not those of the target."""
    rows = "draft_vocabulary.rows"
    mine = tmp_path / "mine"
    shutil.copytree(head, mine, ignore=shutil.ignore_patterns("trainer.pt", "data"))
    given = weights(head)
    ids = given["draft_vocabulary.d2t"].long()
    given[rows] = (3.0 * TOY.target.lm_head_rows(ids).float().flip(0)).bfloat16()
    save_file(given, mine / WEIGHTS)
    losses = itertools.count(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_held_out", lambda _: {"loss": next(losses)})
        ran = run(*going_on(mine, tmp_path / "b", "--data", str(head / "data"), "--json"))
    assert ran.code == 0, ran
    assert torch.equal(weights(tmp_path / "b")[rows], given[rows])  # none were better
    ran = run(*going_on(mine, tmp_path / "b", "--data", str(head / "data"), "--resume", "--epochs", "2", "--json"))
    assert ran.code == 0, ran
    assert weights(tmp_path / "b")[rows].shape == given[rows].shape

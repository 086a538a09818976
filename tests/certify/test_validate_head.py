"""validate-head, export-head, import-head, and each way in which a head does not fit: one line, exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cli_support import EOS, WORDS, Run, refused, toy
from outpace.acceptance.base import Verdict
from outpace.acceptance.greedy import Greedy
from outpace.certify.validate_head import CHECKS, Report, validate
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT
from outpace.heads.checkpoint import facts, save
from outpace.heads.exchange import unused_token
from outpace.heads.fingerprint import ALIKE, alike, cosines, probe
from outpace.heads.head_folder import open_head
from outpace.heads.layouts.base import About
from outpace.heads.layouts.registry import write
from outpace.heads.untrained import random_head
from outpace.model import Model
from outpace.targets.hf import HFTarget
from outpace.targets.table import TableTarget

KINDS = ["eagle3", "eagle", "medusa", "dflash", "draft-lm"]
LAYOUT = {"eagle3": "speculators", "eagle": "eagle", "medusa": "medusa", "dflash": "speculators", "draft-lm": "hf"}


def made(kind: str, rank: int = 0, **options: Any) -> Any:
    """A random head of the toy model, which knows what it was made for."""
    target = toy().target
    head = random_head([kind], target, vocabulary=20, rank=rank, options=options)
    head.config = head.config.model_copy(update={"target": facts(target, "toy")})
    return head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An eagle3 head of the toy model."""
    save(made("eagle3"), tmp_path / "head", {"seed": 3})
    return tmp_path / "head"


def edit(folder: Path, config: dict[str, Any] | None = None, **changed: Callable[[Tensor], Tensor | None]) -> None:
    """Change what is stored."""
    kept = json.loads((folder / "config.json").read_text())
    for key, value in (config or {}).items():
        place, _, name = key.rpartition("__")
        (kept[place] if place else kept)[name] = value
    (folder / "config.json").write_text(json.dumps(kept))
    path = folder / "model.safetensors"
    found = load_file(path)
    for key, change in changed.items():
        name = key.replace("__", ".")
        value = change(found.get(name, torch.zeros(1)))
        found.pop(name, None)
        if value is not None:
            found[name] = value.contiguous()
    save_file(found, path)


def failed(report: Report) -> dict[str, str]:
    return {one.name: one.message for one in report.checks if one.ok is False}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_head_passes_every_check_in_every_layout(kind: str, tmp_path: Path) -> None:
    head, model = made(kind), toy()
    save(head, tmp_path / "ours", {})
    write(head, model.target, tmp_path / "theirs", LAYOUT[kind], About("toy"))
    for place, layout in (("ours", "outpace"), ("theirs", LAYOUT[kind])):
        report = validate(tmp_path / place, model, tokens=24)
        assert [one.name for one in report.checks] == list(CHECKS)
        assert failed(report) == {}
        assert report.ok
        assert (report.kind, report.layout) == (kind, layout)
        said = report.checks[-1].message
        assert "draft tokens accepted" in said
        assert ("is it trained" in said) is (" 0 of" in said)


DAMAGE: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("target", {"target__hidden_size": 64}, {}, "its hidden size is 64, this model's 30"),
    ("target", {"target__vocab_size": 31}, {}, "its vocabulary is 31, this model's 30"),
    ("target", {"target__num_layers": 9}, {}, "its number of layers is 9, this model's"),
    ("fingerprint", {"target__fingerprint": [0.1] * 60}, {}, "made for other weights"),
    ("fingerprint", {"target__fingerprint": []}, {}, "made for other weights"),
    ("configuration", {"format": 2}, {}, "format 2"),
    ("configuration", {"heads": "many"}, {}, "heads"),
    ("configuration", {"kind": "oracle"}, {}, "unknown kind of head 'oracle'"),
    ("configuration", {"options__steps": 99}, {}, "describes no eagle3 head"),
    ("layers", {"aux_hidden_state_layers": [0, 99]}, {}, "reads layer 99"),
    ("keys", {}, {"fc__weight": lambda one: None}, "lacks tensor fc.weight"),
    ("keys", {}, {"extra": lambda one: one}, "does not know: extra"),
    ("shapes", {}, {"fc__weight": lambda one: one[:-1]}, "fc.weight of shape"),
    ("shapes", {"intermediate": 16}, {}, "mlp.gate_proj.weight of shape"),
    ("numbers", {}, {"norm__weight": lambda one: one * float("inf")}, "norm.weight with numbers that are not finite"),
    ("numbers", {}, {"norm__weight": lambda one: one.double()}, "norm.weight of torch.float64"),
    ("vocabulary", {}, {"draft_vocabulary__d2t": lambda one: one.flip(0)}, "not in the order"),
    ("vocabulary", {}, {"draft_vocabulary__d2t": lambda one: one + 10}, "tokens that this model does not have"),
    ("vocabulary", {}, {"draft_vocabulary__d2t": lambda one: one.clamp_min(12)}, "two draft tokens for one"),
    ("vocabulary", {"vocabulary": 7}, {}, "vocabulary map of 7 tokens"),
]


@pytest.mark.parametrize(("name", "config", "changed", "said"), DAMAGE)
def test_what_is_wrong_is_named(
    name: str, config: dict[str, Any], changed: dict[str, Any], said: str, folder: Path
) -> None:
    edit(folder, config, **changed)
    report = validate(folder, toy())
    assert not report.ok
    assert said in failed(report)[name]
    assert report.checks[-1].ok is None


def test_several_faults_are_all_named(folder: Path) -> None:
    edit(folder, {"target__fingerprint": []}, fc__weight=lambda one: one[:-1], norm__weight=lambda one: None)
    assert set(failed(validate(folder, toy()))) == {"fingerprint", "keys", "shapes"}


def test_an_answer_that_differs_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(scores: Any, *rest: Any) -> Verdict:
        """Takes the first draft token whatever the target says."""
        return Verdict((0,), scores.argmax(0)) if scores.nodes else Verdict((), scores.argmax(ROOT))

    monkeypatch.setattr(Greedy, "accept", lambda rule, scores, *rest: [credulous(one) for one in scores])
    assert "answers otherwise than autoregressive decoding" in failed(validate(folder, toy()))["decoding"]


def test_a_method_that_drafts_nothing_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.certify.validate_head._DRAFT", 0)
    assert "drafts nothing" in failed(validate(folder, toy()))["decoding"]


def test_the_command_prints_the_checks_and_its_exit_code_tells(cli: Run, folder: Path) -> None:
    ran = cli("validate-head", str(folder), "--json")
    told = json.loads(ran.out)
    assert (ran.code, told["ok"], told["kind"], told["layout"]) == (0, True, "eagle3", "outpace")
    assert [one["check"] for one in told["checks"]] == list(CHECKS)
    shown = cli("validate-head", str(folder)).out
    assert all(name in shown for name in CHECKS)
    edit(folder, None, fc__weight=lambda one: None)
    ran = cli("validate-head", str(folder), "--json")
    told = json.loads(ran.out)
    assert (ran.code, told["ok"]) == (2, False)
    assert ran.err.splitlines() == ["error: keys: lacks tensor fc.weight"]
    refused(cli("validate-head", "nowhere"), "no such folder")


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_head_of_an_earlier_version_is_read(kind: str, tmp_path: Path) -> None:
    head, folder, former = made(kind, rank=4), tmp_path / "head", {"draft_vocabulary.d2t": "words.ids"}
    save(head, folder, {})
    config = json.loads((folder / "config.json").read_text())
    config["taps"] = config.pop("aux_hidden_state_layers")
    (folder / "config.json").write_text(json.dumps(config))
    before = load_file(folder / "model.safetensors")
    former |= {
        name: name.replace("draft_vocabulary.", "words.") for name in ("draft_vocabulary.down", "draft_vocabulary.up")
    }
    former |= {name: name.replace("fc_norm.", "tap_norms.") for name in before if name.startswith("fc_norm.")}
    assert former.keys() <= before.keys()
    save_file({former.get(name, name): value for name, value in before.items()}, folder / "model.safetensors")
    after = open_head(folder).load(toy().target).state_dict()
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(after[name], value.to(after[name].dtype))] == []
    assert validate(folder, toy(), tokens=8).ok


@pytest.mark.parametrize("kind", KINDS)
def test_out_and_back_through_the_command_line(kind: str, cli: Run, tmp_path: Path) -> None:
    head = made(kind)
    save(head, tmp_path / "ours", {"seed": 3})
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    common = ["--layout", LAYOUT[kind], "--verifier", "hub/toy", "--json"]
    told = json.loads(cli("export-head", str(tmp_path / "ours"), *common, "--out", out).out)
    assert (told["kind"], told["layout"], told["model"]) == (kind, LAYOUT[kind], "hub/toy")
    assert set(told["files"]) == {path.name for path in Path(out).iterdir()}
    told = json.loads(cli("import-head", out, "--out", back, "--json").out)
    assert (told["kind"], told["layout"]) == (kind, "outpace")
    again, before = open_head(Path(back)).load(toy().target), open_head(tmp_path / "ours").load(toy().target)
    for name, value in before.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert again.config.target.fingerprint == head.config.target.fingerprint
    assert json.loads((Path(back) / "training.json").read_text())["seed"] == 3
    plain = json.loads(cli("generate", "abc", "--method", "none", "-n", "16", "--json").out)
    method = {"draft-lm": "distill"}.get(kind, kind)
    for place in (out, back):
        drafted = json.loads(cli("generate", "abc", "--method", method, "--head", place, "-n", "16", "--json").out)
        assert drafted["tokens"] == plain["tokens"]


def test_what_cannot_be_exported_or_imported_is_said_in_a_line(cli: Run, folder: Path, tmp_path: Path) -> None:
    here = str(folder)
    new = str(tmp_path / "new")
    refused(cli("export-head", here, "--layout", "gguf", "--out", new), "unknown layout 'gguf'")
    refused(cli("export-head", here, "--layout", "medusa", "--out", new), "it is written as: eagle, speculators")
    refused(cli("export-head", here, "--layout", "eagle", "--out", here), "not empty")
    refused(cli("export-head", "nowhere", "--layout", "eagle", "--out", new), "no such folder")
    refused(cli("export-head", "eagle3", "--layout", "eagle", "--out", new), "no head of this kind is shipped for")
    refused(cli("import-head", here, "--out", new), "of outpace's own layout already")
    refused(cli("import-head", str(tmp_path), "--out", new), "no config.json")
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text(json.dumps({"model_type": "bert"}))
    refused(cli("import-head", str(strange), "--out", new), "not the configuration of a head")
    assert not Path(new).exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"target__hidden_size": 64}, "its hidden size is 64"),
        ({"target__vocab_size": 31}, "its vocabulary is 31"),
        ({"target__num_layers": 9}, "its number of layers is 9"),
        ({"target__fingerprint": [0.1] * 60}, "other weights than this model's"),
    ],
)
def test_a_head_for_another_target_is_refused_by_every_command(
    config: dict[str, Any], said: str, cli: Run, folder: Path, tmp_path: Path
) -> None:
    edit(folder, config)
    refused(cli("generate", "abc", "--method", "eagle3", "--head", str(folder)), said)
    refused(cli("export-head", str(folder), "--layout", "eagle", "--out", str(tmp_path / "new")), said)


def test_a_file_that_was_cut_short_is_refused(cli: Run, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(cli("generate", "abc", "--method", "eagle3", "--head", str(folder)), "damaged or cut short")
    assert failed(validate(folder, toy()))["weights"]
    path.unlink()
    refused(cli("generate", "abc", "--method", "eagle3", "--head", str(folder)), "it has no model.safetensors")
    (folder / "config.json").write_text("{")
    refused(cli("generate", "abc", "--method", "eagle3", "--head", str(folder)), "config.json cannot be read")


def unused(model: Model) -> int | None:
    return unused_token(model.tokenizer, model.eos_ids, model.target.vocab_size)


def test_a_mask_takes_the_place_of_a_token_that_nobody_uses() -> None:
    used = unused(toy())
    assert used is None  # the toy tokenizer's one special token ends its answers

    class Reserved(type(toy().tokenizer)):  # type: ignore[misc]
        def token_bytes(self, token: int) -> bytes | None:
            return None if token in (EOS, 4) else WORDS[token].encode()

    model = toy()
    assert unused(Model("toy", model.target, Reserved(), model.eos_ids)) == 4


def test_a_head_is_saved_over_another_without_mixing_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import outpace.heads.checkpoint as checkpoint

    def killed(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    other = made("eagle3", steps=2)
    monkeypatch.setattr(checkpoint, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        save(other, folder, {})
    monkeypatch.undo()
    with pytest.raises(BadInput, match=r"no model\.safetensors"):
        open_head(folder).load(toy().target)
    assert not list(folder.glob("*.unfinished"))


def llama(hidden: int, seed: int = 0) -> Any:
    """A small random Llama whose layers all matter a little."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(hidden_size=hidden, vocab_size=97, initializer_range=0.1, **sizes)).eval()


@pytest.mark.parametrize("hidden", [32, 64])
def test_fingerprints_tell_weights_apart_and_not_precisions(hidden: int) -> None:
    model = llama(hidden)
    exact = probe(HFTarget(model))
    assert alike(exact, probe(HFTarget(llama(hidden).bfloat16())))
    assert not alike(exact, probe(HFTarget(llama(hidden, seed=1))))
    with torch.no_grad():
        for weight in model.model.layers[2].mlp.parameters():
            weight.zero_()
    embeddings, states = cosines(exact, probe(HFTarget(model)))
    assert (embeddings == 1.0) > (states > ALIKE)


def test_fingerprints_of_tables_agree_with_themselves() -> None:
    one, other = TableTarget(12, seed=1), TableTarget(12, seed=2)
    assert alike(probe(one), probe(TableTarget(12, seed=1)))
    assert not alike(probe(one), probe(other))

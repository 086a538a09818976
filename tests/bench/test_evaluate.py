"""eval-head counts what decoding accepts; its baselines are what they say; untrained heads stand in for trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace.loading
from cli_support import Run, refused, toy
from outpace.bench.bigram import BigramDrafter, Bigrams, bigram_method
from outpace.bench.head_evaluation import FIGURES, by_depth, evaluate, gains, head_facts
from outpace.bench.head_subjects import Subject, choose_methods, head_subjects, own_answers, untrained_subjects
from outpace.bench.settings import BenchSettings
from outpace.certify import certify
from outpace.certify.exact import toy_head
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.heads.base import Head
from outpace.heads.checkpoint import facts, new_head, save
from outpace.heads.kinds import find_kind, plan
from outpace.heads.untrained import as_training_begins, random_head
from outpace.methods.registry import drafting_with
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.targets.table import TableTarget, random_table
from outpace.training.dataset import held_out
from outpace.training.shards import Conversation, Shards

PROMPTS = [
    Prompt("one", "x", ("a cat sat",)),
    Prompt("two", "y", ("the end", "and more")),
    Prompt("three", "x", ("of it",)),
]
SHORT = ("--limit", "2", "-n", "12")


def a_head(model: Model, kind: str = "medusa", words: int = 0) -> Head:
    """A head for this model with weights that were never trained."""
    config = plan(find_kind(kind), facts(model.target, model.name), size="tiny", vocabulary=words)
    return new_head(config, model.target, torch.arange(config.vocabulary), seed=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(a_head(toy()), tmp_path / "head", {"tokens": 1000, "minutes": 0.5})
    return tmp_path / "head"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": prompt.turns[0], "category": prompt.category} for prompt in PROMPTS]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


# ------------------------------------------------------------------------------------------------- the figures


def test_the_figures_are_those_of_a_hand_count() -> None:
    """The same requests decoded once more, and counted from their rounds."""
    model = toy()
    method = bigram_method(model.target, own_answers(model, PROMPTS, 24), max_nodes=6)
    found = evaluate(model, [Subject("bigram", "tree", method)], PROMPTS, BenchSettings(max_new_tokens=24))
    plain, row = found["drafters"]

    rounds, committed, drafted, at_depth, lengths = 0, 0, 0, [0] * 6, dict.fromkeys("xy", (0, 0))
    for prompt in PROMPTS:
        said: list[dict[str, str]] = []
        for turn in prompt.turns:
            said.append({"role": "user", "content": turn})
            context = tuple(model.tokenizer.chat(said))
            decoder = Decoder(model.target)
            request = Request(context, method, max_new_tokens=24, stop_ids=model.eos_ids, trace=True)
            generation = decoder.submit(request)
            decoder.run()
            said.append({"role": "assistant", "content": model.tokenizer.decode(generation.tokens)})
            for one in generation.rounds:
                accepted = min(len(one.path), len(one.committed))
                rounds, committed, drafted = rounds + 1, committed + len(one.committed), drafted + len(one.tree)
                for depth in range(accepted):
                    at_depth[depth] += 1
            before = lengths[prompt.category]
            new = sum(len(one.committed) for one in generation.rounds)
            lengths[prompt.category] = (before[0] + new, before[1] + len(generation.rounds))
    assert at_depth[1] > 0, "the count should have something to count"
    assert row["mean_acceptance_length"] == pytest.approx(committed / rounds)
    assert row["per_position_acceptance"] == pytest.approx([count / rounds for count in at_depth if count])
    conditional = [now / then for now, then in zip(at_depth, [rounds, *at_depth], strict=False) if now]
    assert row["acceptance_by_depth"] == pytest.approx(conditional)
    assert row["acceptance_rate"] == pytest.approx(sum(at_depth) / drafted)
    by_task = {name: part["mean_acceptance_length"] for name, part in row["by_category"].items()}
    assert by_task == pytest.approx({name: tokens / count for name, (tokens, count) in lengths.items()})
    assert row["identical"] == {"same": 3, "of": 3, "near_ties": 0}
    assert (plain["drafter"], plain["mean_acceptance_length"], plain["acceptance_by_depth"]) == ("none", 1.0, [])


def test_acceptance_by_depth_is_given_what_came_before() -> None:
    assert by_depth([0.8, 0.4, 0.1]) == pytest.approx([0.8, 0.5, 0.25])
    assert by_depth([]) == []


# ----------------------------------------------------------------------------------------------- the baselines


def test_a_head_gains_where_one_of_its_methods_is_surely_faster() -> None:
    def row(drafter: str, shape: str, speedup: float | None, interval: list[float] | None) -> dict[str, Any]:
        return {"drafter": drafter, "shape": shape, "speedup": speedup, "speedup_ci95": interval}

    fast = row("eagle3", "tree", 1.4, [1.2, 1.6])
    assert gains([fast], ["eagle3"])
    assert gains([row("eagle3", "tree", 1.1, None)], ["eagle3"])
    assert not gains([], ["eagle3"])
    assert not gains([fast], ["medusa"]), "another drafter's gain is not the head's"
    assert not gains([row("eagle3", "tree of 60", 1.4, [1.2, 1.6])], ["eagle3"]), "nobody drafts so much in use"
    for speedup, interval in ((0.9, [0.8, 0.95]), (1.1, [0.9, 1.3]), (1.0, None), (None, None)):
        assert not gains([row("eagle3", "chain", speedup, interval)], ["eagle3"])


@pytest.mark.parametrize("pays", [True, False])
def test_a_head_that_does_not_pay_is_said_not_to(
    cli: Run, folder: Path, questions: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    monkeypatch.setattr("outpace.bench.head_evaluation.gains", lambda *_: pays)
    ran = cli("eval-head", str(folder), "--prompts", str(questions), "-n", "8")
    assert ("No method is faster with this head" in ran.out) is not pays
    assert ("more data" in ran.out) is not pays


def test_bigrams_are_counted() -> None:
    table = Bigrams.fit([[1, 2, 1, 2, 1, 3], [1, 2], [4], []], 5)
    assert table.tokens == 6
    assert table.after(1) == [(2, 0.75), (3, 0.25)]
    assert table.after(2) == [(1, 1.0)]
    assert table.after(4) == []
    with pytest.raises(BadInput, match="token 9"):
        Bigrams.fit([[1, 9]], 5)


def test_bigrams_of_a_folder_know_what_was_trained_on_and_no_more(tmp_path: Path) -> None:
    keys = [f"prompt {number}" for number in range(200)]
    kept = next(key for key in keys if held_out(key))
    seen = next(key for key in keys if not held_out(key))
    shards = Shards(tmp_path / "data", {})
    shards.append([Conversation(seen, [0, 1], [2, 3]), Conversation(kept, [0, 1], [4, 4])])
    table = Bigrams.of(tmp_path / "data", 5)
    assert table.after(1) == [(2, 1.0)], "the answer's first token follows the prompt's last"
    assert table.after(0) == [], "what users say is not drafted"
    assert table.after(4) == []
    with pytest.raises(BadInput, match="no conversations"):
        Bigrams.of(tmp_path / "nowhere", 5)
    assert not (tmp_path / "nowhere").exists()


def test_a_bigram_drafter_follows_the_likeliest() -> None:
    target = TableTarget(6, random_table(6, 1))
    table = Bigrams.fit([[1, 2, 3, 1, 2, 4, 1, 2, 3]], 6)
    sequence = target.sequence([0, 1])
    for width, paths in ((1, [(2,), (2, 3), (2, 3, 1)]), (2, [(2,), (2, 3), (2, 3, 1), (2, 4)])):
        drafter = BigramDrafter(table, width)
        tree = drafter.propose(drafter.begin(sequence), Budget(3, 4, width))
        found = [tuple(tree.path_tokens(node)) for node in range(len(tree))]
        assert sorted(found) == sorted(paths)


def test_the_untrained_baseline_is_the_same_network_without_what_it_learned() -> None:
    model = toy()
    trained = a_head(model, words=20)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(1.0)
    state = torch.random.get_rng_state()
    fresh = as_training_begins(trained, model.target, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state), "measuring must not change what is random elsewhere"
    assert fresh.config == trained.config
    assert fresh.draft_vocabulary.d2t.tolist() == trained.draft_vocabulary.d2t.tolist()
    pairs = list(zip(fresh.parameters(), trained.parameters(), strict=True))
    assert pairs
    assert not any(torch.equal(one, other) for one, other in pairs)
    again = as_training_begins(trained, model.target, seed=1)
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), again.parameters(), strict=True))


# -------------------------------------------------------------------------------- which method, and which shapes


def test_a_head_is_measured_with_the_method_of_its_kind() -> None:
    assert drafting_with("dflash")[0] == "dflash"
    assert choose_methods("bpd", None) == ["bpd"]
    assert choose_methods("dflash", None) == ["dflash", "ddtree"]
    assert choose_methods("dflash", "ddtree") == ["ddtree"]
    with pytest.raises(BadInput, match="method 'bpd' does not draft with a head of kind medusa"):
        choose_methods("medusa", "bpd")
    with pytest.raises(BadInput, match="'pld' does not draft"):
        choose_methods("medusa", "pld")
    with pytest.raises(BadInput, match="no method drafts with a head of kind xyz"):
        choose_methods("xyz", None)


def test_drafters_of_trees_are_measured_as_chains_too() -> None:
    model = toy()
    both = head_subjects(model, random_head(("medusa",), model.target), {"medusa": {}})
    assert [one.shape for one in both] == ["tree", "tree of 60", "chain", "chain of 6"]
    chain = both[3].method
    for text in ("a cat", "it is"):
        decoder = Decoder(model.target)
        request = Request(tuple(model.tokenizer.encode(text)), chain, max_new_tokens=12, trace=True)
        generation = decoder.submit(request)
        decoder.run()
        trees = [one.tree for one in generation.rounds]
        assert any(len(tree) > 1 for tree in trees)
        assert all(tree.depths[-1] == len(tree) for tree in trees if len(tree))
    alone = head_subjects(model, random_head(("dflash",), model.target), {"dflash": {}, "ddtree": {}}, "my {}")
    labels = ["my dflash chain", "my dflash chain of 6", "my ddtree tree", "my ddtree tree of 60"]
    assert [one.label for one in alone] == labels, "one of the two drafts chains"
    fixed = head_subjects(model, random_head(("medusa",), model.target), {"medusa": {"max_nodes": 3}})
    assert [one.shape for one in fixed] == ["tree", "chain"], "the user has fixed another size"
    for kind, names in (("medusa", ["medusa"]), ("dflash", ["dflash", "ddtree"])):
        bare = untrained_subjects(model, random_head((kind,), model.target), {name: {} for name in names})
        assert [one.label for one in bare] == [f"untrained {kind} chain of 6"]


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_s_json(cli: Run, folder: Path, questions: Path, tmp_path: Path) -> None:
    shards = Shards(tmp_path / "data", {})
    shards.append([Conversation(str(number), [1, 2], [3, 4, 5]) for number in range(6)])
    ran = cli(
        "eval-head", str(folder), "--prompts", str(questions), "-n", "12", "--json", "--param", "max_nodes=3",
        "--baselines", "--data", str(tmp_path / "data"),
    )  # fmt: skip
    assert ran.code == 0, ran
    found = json.loads(ran.out)
    assert found["complete"] is True
    names = [(row["drafter"], row["shape"]) for row in found["drafters"]]
    pair = ("tree", "chain")
    assert names == [
        ("none", None),
        *(("medusa", shape) for shape in pair),
        ("untrained medusa", "chain"),
        *(("bigram", shape) for shape in pair),
    ]
    for row in found["drafters"]:
        assert row.keys() == {"drafter", "shape", "method", "head", *FIGURES, "by_category", "error"}
        assert row["error"] is None
        assert list(row["by_category"]) == ["x", "y"]
        assert row["by_category"]["x"].keys() == set(FIGURES)
        assert row["identical"]["same"] == 3
    head = found["head"]
    assert head["kind"] == "medusa"
    assert head["parameters"] == sum(weight.numel() for weight in a_head(toy()).parameters())
    assert head["bytes"] == (folder / "model.safetensors").stat().st_size
    assert head["training"] == {"tokens": 1000, "minutes": 0.5}
    assert found["settings"]["method_settings"] == {"medusa": {"max_nodes": "3"}}
    assert found["settings"]["bigrams_of"] == str(tmp_path / "data")


def test_the_command_s_table(cli: Run, folder: Path, questions: Path) -> None:
    ran = cli("eval-head", str(folder), "--prompts", str(questions), *SHORT, "-t", "0.8", "--param", "max_nodes=3")
    assert ran.code == 0, ran
    assert "medusa tree" in ran.out
    assert "tok/fwd by task" in ran.out
    assert "untrained" not in ran.out
    assert cli("eval-head", str(folder), *SHORT).code == 0, "the embedded prompts are the default"


def test_bad_input_is_said_in_one_line(
    cli: Run, folder: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*more: str) -> tuple[str, ...]:
        return ("eval-head", str(folder), "--prompts", str(questions), *SHORT, *more)

    refused(cli(*asked("--method", "pld")), "'pld' does not draft with a head of kind medusa")
    refused(cli(*asked("--param", "depth=1")), "no chosen method has the setting 'depth'")
    refused(cli(*asked("--baselines", "--data", str(tmp_path))), "no conversations")
    other = tmp_path / "other"
    save(a_head(Model("other", TableTarget(12), toy().tokenizer, frozenset())), other, {})
    refused(cli("eval-head", str(other), *SHORT), "another target", "hidden size")

    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the options were checked")

    monkeypatch.setattr(outpace.loading, "load", no_model)
    refused(cli("eval-head", str(tmp_path / "none")), "no such folder")
    refused(cli("eval-head", str(tmp_path / "data")), "no head at")
    refused(cli("eval-head", str(folder), "--prompts", str(tmp_path / "none.txt")), "none.txt")
    refused(cli(*asked("-n", "0")), "--max-new-tokens")
    refused(cli(*asked("--data", str(tmp_path))), "--baselines")
    refused(cli(*asked("--limit", "0")), "limit")
    refused(cli("eval-head", "medusa", *SHORT), "there is no head at 'medusa'", "no kind of head that is shipped")
    refused(cli("eval-head", "eagle3", "--record"), "--record writes into the head's folder")


def test_what_was_measured_is_kept_with_the_head(cli: Run, folder: Path, questions: Path) -> None:
    command = ("eval-head", str(folder), "--prompts", str(questions), "-n", "8", "--record", "--json")
    shown = json.loads(cli(*command, "--baselines").out)
    about = json.loads((folder / "training.json").read_text())
    assert about["tokens"] == 1000, "where the head comes from stays"
    kept = about["measured"]["temperature 0"]
    shapes = ["tree", "tree of 60", "chain", "chain of 6"]
    assert [(row["method"], row["shape"]) for row in kept["drafters"]] == [("medusa", shape) for shape in shapes]
    for row, whole in zip(kept["drafters"], shown["drafters"][1:5], strict=True):
        assert {**whole, **row} == whole
    assert kept["prompts"] == 3
    cli(*command, "-t", "1", "--limit", "2")
    both = json.loads((folder / "training.json").read_text())["measured"]
    assert both["temperature 0"] == kept
    assert both["temperature 1"]["prompts"] == 2


def test_a_damaged_provenance_is_said(folder: Path) -> None:
    (folder / "training.json").write_text("{")
    with pytest.raises(BadInput, match=r"training\.json cannot be read"):
        head_facts(folder, a_head(toy()))
    (folder / "training.json").unlink()
    assert head_facts(folder, a_head(toy()))["training"] is None


# ------------------------------------------------------------------------ untrained heads, and what they certify


@pytest.mark.parametrize("vocab_size", [3, 4, 5])
def test_toy_heads_differ_in_what_they_can_draft(vocab_size: int) -> None:
    heads = [toy_head("eagle3", vocab_size, number) for number in range(4)]
    assert [len(head.draft_vocabulary) for head in heads] == [vocab_size, vocab_size - 1, vocab_size, vocab_size - 1]
    assert [head.config.rank for head in heads] == [0, 0, 2, 0]
    assert [head.config.options["norms"] for head in heads] == ["attdrift", "attdrift", "attdrift", "eagle3"]
    assert heads[1].draft_vocabulary.d2t.tolist() == list(range(1, vocab_size))
    assert toy_head("eagle3", vocab_size, 0) is heads[0]


def test_random_heads_are_reproducible_and_lively() -> None:
    target = TableTarget(7)
    one, same, other = (random_head(("eagle3",), target, seed=seed) for seed in (1, 1, 2))
    weights = [dict(head.named_parameters()) for head in (one, same, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    matrices = [weight for weight in weights[0].values() if weight.dim() == 2]
    assert all(float(weight.std()) > 0.1 for weight in matrices), "what a head reads must move what it drafts"


@pytest.mark.parametrize("level", ["greedy", "statistical"])
def test_without_a_trained_head_an_untrained_one_is_certified(level: str, folder: Path) -> None:
    model, prompts = toy(), ["a cat", "of it"]
    options: dict[str, Any] = {"level": level, "samples": 150, "settings": {"max_nodes": 3}, "prompts": prompts}
    certificate = certify("medusa", model, **options)
    assert certificate.lossless is True, certificate
    assert "untrained medusa head" in certificate.verdict
    named = certify("medusa", model, head=folder, **options)
    assert named.lossless is not False
    assert "untrained" not in named.verdict
    with pytest.raises(BadInput, match="no such folder"):
        certify("medusa", model, head=folder / "none", **options)

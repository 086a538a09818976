"""outpace certify: the JSON contract, exit codes, words for bad input, and methods of another package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outpace.loading
from cli_support import Run, refused
from outpace.methods import registry

KEYS = {"method", "lossless", "level", "p_value", "max_abs_error", "detectable_bias", "first_difference"}

ACME = '''
"""Methods of another package: an honest one, one that takes the residual for p, one that never drafts."""

from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import Rejection
from outpace.controllers.fixed import Fixed
from outpace.drafting.base import Drafter, DraftState
from outpace.core.proposal import Proposal
from outpace.methods.registry import Context, NoSettings, Parts, register
from outpace.core.q_row import QRow
from outpace.core.tree import TokenTree
import torch


class Flat(Drafter):
    proposal = Proposal(sampled=True)

    def __init__(self, vocab: int, idle: bool = False) -> None:
        self.row, self.idle = QRow(torch.full((vocab,), 1 / vocab)), idle

    def begin(self, sequence):
        return DraftState(sequence)

    def propose(self, state, budget):
        tree, chance = TokenTree(), self.chance(state.sequence)
        for _ in range(0 if self.idle else budget.depth):
            tree.add(len(tree) - 1, chance.categorical(self.row.probs), self.row)
        return tree


class Generous(Rejection):
    """Every draft token is accepted."""

    def accept(self, scores, states, chances):
        return [
            Verdict(tuple(range(len(one.tree))), chance.categorical(one.p(len(one.tree) - 1)))
            for one, chance in zip(scores, chances)
        ]


class Second(Rejection):
    """Now and then the runner-up, at temperature 0."""

    lossless = False

    def accept(self, scores, states, chances):
        return [Verdict((), int(one.distribution.processed([-1])[0].topk(2).indices[1])) for one in scores]


@register("acme-flat", family="acme", paper="none", summary="Uniform tokens.", tiny={})
def flat(context: Context, settings: NoSettings) -> Parts:
    return Parts(Flat(context.target.vocab_size), Fixed(2), Rejection())


@register("acme-generous", family="acme", paper="none", summary="Uniform tokens, all accepted.")
def generous(context: Context, settings: NoSettings) -> Parts:
    return Parts(Flat(context.target.vocab_size), Fixed(2), Generous())


@register("acme-second", family="acme", paper="none", summary="Not the best token.")
def second(context: Context, settings: NoSettings) -> Parts:
    return Parts(Flat(context.target.vocab_size), Fixed(2), Second())


@register("acme-idle", family="acme", paper="none", summary="Nothing at all.")
def idle(context: Context, settings: NoSettings) -> Parts:
    return Parts(Flat(context.target.vocab_size, idle=True), Fixed(2), Rejection())
'''


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that is installed beside outpace and names its methods in an entry point."""
    (tmp_path / "acme_drafts.py").write_text(ACME)
    info = tmp_path / "acme_drafts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-drafts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[outpace.methods]\nacme = acme_drafts\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(registry._REGISTRY)
    registry._discover.cache_clear()
    yield
    registry._REGISTRY.clear()
    registry._REGISTRY.update(before)
    sys.modules.pop("acme_drafts", None)
    registry._discover.cache_clear()


def strict(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


# ------------------------------------------------------------------------------------------------- JSON, exit code 0


def test_exact_json_is_the_contract(cli: Run) -> None:
    ran = cli("certify", "pld", "--cells", "6", "--seed", "1", "--json")
    assert ran.code == 0, ran
    found = strict(ran.out)
    assert set(found) >= KEYS
    assert found["method"] == "pld"
    assert found["level"] == "exact"
    assert found["lossless"] is True
    assert found["max_abs_error"] <= 1e-6
    assert found["p_value"] is found["detectable_bias"] is found["first_difference"] is None
    assert len(found["checks"]) == 6
    assert ran.err == "certification ...\n"


def test_exact_needs_no_model(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(outpace.loading, "load", load)
    ran = cli("certify", "draft-model", "--cells", "1", "--seed", "4")
    assert ran.code == 0, ran
    assert "draft-model  lossless  (exact level)" in ran.out
    assert "exact: output probabilities equal those of autoregressive decoding" in ran.out


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("abc abc abc", "q q q")))
    return str(path)


def test_statistical_json(cli: Run, prompts: str) -> None:
    options = ["--level", "statistical", "--samples", "600", "--seed", "2", "--threads", "1", "--prompts", prompts]
    ran = cli("certify", "draft-model", *options, "--draft-model", "toy", "--json")
    assert ran.code == 0, ran
    found = strict(ran.out)
    assert set(found) >= KEYS
    assert (found["level"], found["lossless"]) == ("statistical", True)
    assert 0 < found["p_value"] <= 1
    assert 0 < found["detectable_bias"] < 1
    assert found["max_abs_error"] is found["first_difference"] is None
    assert found["verdict"].startswith("no bias above")
    assert found["sampling"] == "temperature 1"
    assert found["rescored"]["prefixes"] == 64
    assert found["rescored"]["differing"] == found["rescored"]["largest_difference"] == 0


def test_sampling_parameters_are_certified_at_every_level(cli: Run, prompts: str) -> None:
    """Those of the command, and what is not given at the level's own temperature."""
    at = ["--prompts", prompts, "--threads", "1", "--draft-model", "toy", "--json"]
    cases = [
        (["--cells", "1", "-t", "0.7", "--top-p", "0.9"], "temperature 0.7, top-p 0.9"),
        (["--cells", "1", "--logit-bias", "2=-0.5"], "temperature 1, logit-bias 2=-0.5"),
        (["--cells", "1", "-t", "0"], "temperature 0"),
        (["--cells", "1"], ""),
        (["--level", "statistical", "--samples", "300", "--top-k", "5", *at], "temperature 1, top-k 5"),
        (
            ["--level", "statistical", "--samples", "300", "-t", "0.8", "--repetition-penalty", "1.2", *at],
            "temperature 0.8, repetition-penalty 1.2",
        ),
        (["--level", "greedy", "--presence-penalty", "0.5", *at], "temperature 0, presence-penalty 0.5"),
        (["--level", "greedy", *at], "temperature 0"),
    ]
    for argv, said in cases:
        ran = cli("certify", "draft-model", *argv, *([] if "--json" in argv else ["--json"]))
        assert ran.code == 0, ran
        found = strict(ran.out)
        assert found["sampling"] == said
        if "--cells" in argv and said:
            assert found["checks"][0]["name"].startswith(said)
    assert "(exact level, temperature 0.7, top-p 0.9)" in cli("certify", "draft-model", *cases[0][0]).out


def test_greedy_json_and_words(cli: Run, prompts: str) -> None:
    common = ["certify", "draft-model", "--draft-model", "toy", "--level", "greedy", "--prompts", prompts]
    ran = cli(*common, "--json", "--threads", "1")
    assert ran.code == 0, ran
    found = strict(ran.out)
    assert set(found) >= KEYS
    assert (found["level"], found["lossless"], found["first_difference"]) == ("greedy", True, None)
    assert len(found["checks"]) == 2
    ran = cli(*common, "--threads", "1")
    assert "2 of 2 answers identical" in ran.out


def test_settings_and_rules_reach_the_method(cli: Run) -> None:
    ran = cli("certify", "draft-model", "--param", "length=1", "--rule", "block", "--cells", "1", "--json")
    assert ran.code == 0, ran
    other = cli("certify", "rsd", "--param", "branching=[2]", "--cells", "1", "--seed", "2", "--json")
    assert other.code == 0, other


def test_the_same_seed_gives_the_same_certificate(cli: Run) -> None:
    one, again, other = (cli("certify", "pld", "--cells", "3", "--seed", seed, "--json").out for seed in "556")
    assert one == again
    assert one != other


# --------------------------------------------------------------------------------------- other packages, codes 1 and 2


@pytest.mark.usefixtures("acme")
def test_a_method_of_another_package_is_certified(cli: Run) -> None:
    ran = cli("certify", "acme-flat", "--cells", "4", "--seed", "3", "--json")
    assert ran.code == 0, ran
    assert strict(ran.out)["lossless"] is True
    assert "acme-flat" in cli("methods").out


@pytest.mark.usefixtures("acme")
def test_a_biased_method_is_exit_code_1_at_every_level(cli: Run, prompts: str) -> None:
    exact = cli("certify", "acme-generous", "--cells", "6", "--seed", "3", "--json")
    assert exact.code == 1, exact
    found = strict(exact.out)
    assert found["lossless"] is False
    assert found["max_abs_error"] > 0.01
    assert any(check["passed"] is False for check in found["checks"])

    words = cli("certify", "acme-generous", "--cells", "6", "--seed", "3")
    assert words.code == 1
    assert "not lossless" in words.out
    assert "off by" in words.out

    level = ["--level", "statistical", "--samples", "1000", "--threads", "1", "--prompts", prompts, "--json"]
    statistical = cli("certify", "acme-generous", *level)
    assert statistical.code == 1, statistical
    assert strict(statistical.out)["p_value"] < 0.01

    greedy = cli("certify", "acme-second", "--level", "greedy", "--threads", "1", "--prompts", prompts, "--json")
    assert greedy.code == 2, "a rule that says itself that it is lossy"
    assert "is lossy" in greedy.err


@pytest.mark.usefixtures("acme")
def test_inconclusive_is_exit_code_2(cli: Run) -> None:
    ran = cli("certify", "acme-idle", "--cells", "2", "--json")
    assert ran.code == 2, ran
    assert strict(ran.out)["lossless"] is None
    words = cli("certify", "acme-idle", "--cells", "2")
    assert words.code == 2
    assert "inconclusive" in words.out


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nothing"], ["unknown method 'nothing'", "see: outpace methods"]),
        (["pld", "--level", "vague"], ["unknown level 'vague'", "exact, statistical, greedy"]),
        (["pld", "--samples", "3"], ["samples must be at least 100, not 3"]),
        (["pld", "--alpha", "0"], ["alpha must be in (0, 1), not 0"]),
        (["pld", "--alpha", "1.5"], ["alpha must be in (0, 1)"]),
        (["pld", "--rule", "best"], ["unknown acceptance rule 'best'"]),
        (
            ["rsd", "--rule", "k-seq"],
            ["rule 'k-seq'", "'rsd' drafts trees of sampled draft tokens without replacement"],
        ),
        (["rsd", "--rule", "gumbel-coupling"], ["rule 'gumbel-coupling'"]),
        (["draft-model", "--param", "depth=3"], ["depth"]),
        (["draft-model", "--param", "length=-3"], ["num_draft_tokens"]),
        (["draft-model", "--level", "greedy", "--threads", "1"], ["draft model", "--draft-model"]),
        (["pld", "--level", "greedy", "--prompts", "/nowhere/at/all.jsonl"], ["/nowhere/at/all.jsonl"]),
        (["pld", "--level", "greedy", "--prompts", "structured"], ["decodes without grammars", "structured"]),
        (["pld", "--level", "statistical", "--prompts", "structured"], ["certify decodes without grammars"]),
        (["--endpoint", "http://localhost:1", "--prompts", "structured"], ["certify decodes without grammars"]),
        (["pld", "--cells", "0"], ["cells must be at least 1"]),
        (["pld", "--cells", "-2"], ["cells must be at least 1"]),
        (["pld", "--threads", "0"], ["--threads"]),
        (["pld", "--level", "greedy", "-t", "0.7"], ["temperature 0, not 0.7", "'statistical'"]),
        (["pld", "--level", "greedy", "--top-p", "0.9"], ["top_p cannot change"]),
        (["pld", "--level", "statistical", "-t", "0"], ["at temperature 0 none is", "'greedy'"]),
        (["pld", "--logit-bias", "300=2"], ["token 0 to 2, not 300"]),
        (["pld", "--top-p", "1.5"], ["top_p must be in (0, 1]"]),
        (["pld", "--samples", "many"], ["--samples"]),
        ([], ["METHOD"]),
    ],
)
def test_bad_input_is_one_line(cli: Run, argv: list[str], said: list[str]) -> None:
    refused(cli("certify", *argv), *said)


@pytest.mark.parametrize("option", [["--samples", "3"], ["--alpha", "7"]])
def test_bad_options_are_found_before_a_model_is_loaded(
    cli: Run, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a typing error costs the wait for a model")

    monkeypatch.setattr(outpace.loading, "load", load)
    refused(cli("certify", "pld", "--level", "statistical", *option), "must be")


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["pld@cactus", "--level", "greedy"], "is lossy"), (["bild", "--level", "statistical"], "method 'bild' is lossy")],
)
def test_lossy_labels_are_refused_before_a_model_is_loaded(
    cli: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a lossy rule costs the wait for a model")

    monkeypatch.setattr(outpace.loading, "load", load)
    refused(cli("certify", *argv), said)


def test_a_method_that_is_lossy_by_default_says_with_which_settings_it_is_not(cli: Run) -> None:
    found = cli("certify", "bild", "--cells", "1", "--samples", "1000")
    assert found.code == 0
    assert "only with rollback(distance=0)" in " ".join(found.out.split())

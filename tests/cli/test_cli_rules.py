"""``outpace rules``, and --rule with --rule-param on the commands that decode."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cli_support import Run, refused
from outpace.acceptance.cactus import Cactus


def test_rules_are_listed(cli: Run) -> None:
    listed = json.loads(cli("rules", "--json").out)
    by_name = {one["name"]: one for one in listed}
    assert set(by_name["typical"]) == {"name", "aliases", "lossless", "bound", "paper", "summary", "settings"}
    assert by_name["typical"]["lossless"] is False
    assert by_name["block"]["lossless"] is True
    epsilon = next(one for one in by_name["typical"]["settings"] if one["name"] == "epsilon")
    assert (epsilon["default"], epsilon["exclusiveMinimum"], epsilon["maximum"]) == (0.09, 0, 1)
    table = cli("rules")
    assert "typical" in table.out
    assert "lossy" in table.out


def test_one_rule_is_shown_by_its_name_or_alias(cli: Run) -> None:
    shown = cli("rules", "tas").out
    assert "epsilon" in shown
    assert "total variation <= 1 - min(epsilon, delta exp(-H(p)))" in shown
    assert "greedy decoding" in shown
    assert "none" in cli("rules", "fly").out
    assert [one["name"] for one in json.loads(cli("rules", "gsd", "--json").out)] == ["grouped"]
    refused(cli("rules", "typicla"), "did you mean 'typical'?")


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",), ("bench",), ("certify", "pld"), ("serve",)])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rule", "cactus", "--rule-param", "delta=-1"), "rule 'cactus', setting 'delta'"),
        (("--rule", "cactus", "--rule-param", "detla=1"), "has no setting 'detla'; did you mean 'delta'?"),
        (("--rule", "cactus", "--rule-param", "delta"), "--rule-param takes KEY=VALUE, not 'delta'"),
        (("--rule", "cactus", "--rule-param", "delta=1", "--rule-param", "delta=2"), "gives 'delta' twice"),
        (("--rule-param", "delta=1"), "give --rule NAME too"),
        (("--rule", "cactus", "--lossless"), "--lossless: rule 'cactus' is lossy"),
    ],
)
def test_bad_rules_are_refused_before_anything_is_loaded(
    cli: Run, command: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    refused(cli(*command, *options), message)


def test_a_server_has_no_lossy_default(cli: Run) -> None:
    refused(cli("serve", "--rule", "typical"), "a lossy rule is never the default of a server")


def test_certify_takes_a_rules_settings(cli: Run) -> None:
    options = ("--level", "bound", "--rule", "importance", "--rule-param", "relax=0.1", "--rule-param", "key=1")
    done = cli("certify", "pld", *options, "--json")
    assert done.code == 0
    found: dict[str, Any] = json.loads(done.out)
    assert found["level"] == "bound"
    assert [one["rule"] for one in found["bounds"]] == ["importance(relax=0.1, key=1)"]
    assert all(one["holds"] for one in found["bounds"])
    shown = cli("certify", "pld", "--level", "bound", "--rule", "fly").out
    assert "no bound broken" in shown
    assert "states no bound" in shown
    refused(cli("certify", "pld", "--rule", "cactus"), "rule 'cactus' is lossy, and level 'exact'")


def test_lossless_also_refuses_methods_that_are_lossy(cli: Run) -> None:
    refused(cli("generate", "hi", "--method", "smcsd", "-t", "1", "--lossless"), "--lossless: method 'smcsd' is lossy")
    refused(cli("bench", "--methods", "pld,copy-decode", "--lossless"), "--lossless: method 'copy-decode' is lossy")
    refused(cli("bench", "--methods", "pld@typical", "--lossless"), "--lossless: rule 'typical' is lossy")
    assert cli("generate", "hi", "--method", "pld", "-n", "4", "--lossless").code == 0


def test_lossless_takes_a_lossy_rule_with_settings_that_mean_lossless(cli: Run) -> None:
    exact = ("--rule", "cactus", "--rule-param", "delta=0")
    done = cli("generate", "hi", "--method", "pld", *exact, "-n", "4", "-t", "1", "--lossless", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)["metrics"]
    assert (answer["lossless"], answer["lossy"]) == (True, None)
    assert cli("certify", "pld", *exact, "--level", "exact", "--cells", "2", "--lossless").code == 0
    refused(
        cli("generate", "hi", "--method", "pld", "--rule", "cactus", "--lossless"),
        "rule 'cactus' is lossy with these settings",
    )


def test_certify_ends_with_1_where_a_bound_is_broken(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that moves more than it says: its limit is stated as half of what it takes."""
    asked = ("certify", "pld", "--level", "bound", "--rule", "cactus", "--rule-param", "delta=0.1", "--cells", "1")
    done = cli(*asked, "--json")
    assert done.code == 0
    assert json.loads(done.out)["passed"] is True
    monkeypatch.setattr(Cactus, "limit", lambda self, node: self.settings.delta / 2)
    done = cli(*asked, "--json")
    assert done.code == 1
    found = json.loads(done.out)
    assert found["passed"] is False
    assert "the bound does not hold" in found["verdict"]
    assert "bound broken" in cli(*asked).out


def test_certify_takes_a_rule_for_temperature_0(cli: Run) -> None:
    done = cli("certify", "pld", "--level", "bound", "--rule", "greedy", "--cells", "1", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["lossless"] is True
    assert cli("certify", "pld", "--rule", "greedy", "--cells", "2").code == 0
    refused(cli("certify", "pld", "--rule", "greedy", "-t", "1"), "rule 'greedy' is for temperature 0")

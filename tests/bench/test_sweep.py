"""One method in several rows: labels and sweeps, from Python and from the command line."""

from __future__ import annotations

import json
import re

import pytest

import outpace
from cli_support import Run, refused, toy
from outpace.bench.sweep import swept
from outpace.core.errors import BadInput

SIZES = {"pld": {}, "sam": {"num_draft_tokens": 3}}


def test_a_sweep_makes_a_row_of_every_combination() -> None:
    assert swept({"none": {}, "pld": {"min_ngram": 1}}, {"pld.num_draft_tokens": [2, 4]}) == {
        "none": {},
        "pld#num_draft_tokens=2": {"min_ngram": 1, "num_draft_tokens": 2},
        "pld#num_draft_tokens=4": {"min_ngram": 1, "num_draft_tokens": 4},
    }
    both = swept({"pld": {}}, {"length": [2, 4], "pld.min_ngram": ["1"]})  # an earlier name, and any method
    assert list(both) == ["pld#num_draft_tokens=2,min_ngram=1", "pld#num_draft_tokens=4,min_ngram=1"]
    assert list(swept({"draft-model#small": {}}, {"num_draft_tokens": [2]})) == ["draft-model#small,num_draft_tokens=2"]
    assert swept({"prompt_lookup": {}}, {}) == {"pld": {}}


def test_a_rule_may_be_swept_by_any_of_its_names() -> None:
    for label, key in (("pld@tas", "tas.epsilon"), ("pld@typical", "tas.epsilon"), ("pld@tas", "typical.epsilon")):
        assert len(swept({label: {}}, {key: [0.1, 0.3]})) == 2
    assert len(swept({"pld@top-beta": {}}, {"specdec.tau": [0.5, 1.0]})) == 2


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"pld.num_draft_token": [2]}, "no compared method has the setting 'num_draft_token'; did you mean"),
        ({"plld.num_draft_tokens": [2]}, "unknown method 'plld'; did you mean 'pld'"),
        ({"rest.num_draft_tokens": [2]}, "'rest' is not among the compared methods; compared: pld, sam"),
        ({"sam.num_draft_tokens": [2]}, "'num_draft_tokens' of sam is swept and set to 3"),
        ({"pld.num_draft_tokens": []}, "give at least one value"),
        ({"pld.num_draft_tokens": "2,4"}, "give at least one value, as a list"),
        ({"pld.num_draft_tokens": ["many"]}, "setting 'num_draft_tokens'"),
        ({"pld.num_draft_tokens": list(range(1, 66))}, "make 66 rows, more than 64"),
    ],
)
def test_what_cannot_be_swept_is_refused(sweep: dict[str, list[int]], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        swept(SIZES, sweep)


def test_rows_carry_their_label_and_settings() -> None:
    report = outpace.bench(
        toy(),
        {"pld#2": {"num_draft_tokens": 2}, "sam": {}},
        ["abc abc", "b"],
        max_new_tokens=8,
        sweep={"sam.num_draft_tokens": [3]},
    )
    told = [(row["method"], row["label"], row["settings"]) for row in report.rows]
    assert told == [
        ("none", None, {}),
        ("pld#2", "2", {"num_draft_tokens": 2}),
        ("sam#num_draft_tokens=3", "num_draft_tokens=3", {"num_draft_tokens": 3}),
    ]


def test_the_command_line_sweeps(cli: Run) -> None:
    asked = ("bench", "--limit", "2", "-n", "8", "--json", "-")
    ran = cli(*asked, "--methods", "pld#2,pld#8,ngram", "--param", "pld#2.num_draft_tokens=2", "--sweep",
              "pld.num_draft_tokens=3,5")  # fmt: skip
    assert ran.code == 0, ran.err
    rows = {row["method"]: row["settings"] for row in json.loads(ran.out)["methods"]}
    assert rows == {
        "none": {},
        "pld#2": {"num_draft_tokens": 2},
        "pld#8": {},
        "pld#num_draft_tokens=3": {"num_draft_tokens": 3},
        "pld#num_draft_tokens=5": {"num_draft_tokens": 5},
    }
    refused(cli(*asked, "--sweep", "pld.num_draft_tokens"), "--sweep takes KEY=V1,V2,...")
    refused(cli(*asked, "--sweep", "depth=1", "--sweep", "depth=2"), "gives 'depth' twice")
    refused(cli(*asked, "--sweep", "pld.num_draft_tokens=[1"), "not valid JSON")


def test_a_label_that_looks_like_a_name_is_noted(cli: Run) -> None:
    asked = ("bench", "--limit", "1", "-n", "4", "--draft-model", "small=other", "--json", "-")
    ran = cli(*asked, "--methods", "draft-model#smal")
    assert ran.code == 0, ran.err
    assert "draft-model#smal: no draft model or head is named 'smal'" in ran.err
    assert "did you mean 'small'?" in " ".join(ran.err.split())
    free = cli(*asked, "--methods", "draft-model#2")
    assert free.code == 0, free.err
    assert "no draft model or head is named" not in free.err


def test_a_row_names_its_rule_and_sweeps_it() -> None:
    methods = {"none": {}, "pld": {}, "pld@specdec": {"min_ngram": 1}}
    assert list(swept(methods, {"tau": [0.5, "2"], "pld.num_draft_tokens": [2]})) == [
        "none",
        "pld#num_draft_tokens=2",
        "pld@top-beta(tau=0.5)",
        "pld@top-beta(tau=2)",
    ]
    both = swept({"pld@top-beta(beta=2)": {}}, {"top-beta.tau": [1], "num_draft_tokens": [3]})
    assert both == {"pld#num_draft_tokens=3@top-beta(beta=2,tau=1)": {"num_draft_tokens": 3}}
    lists = swept({"draft-model#small@top_beta( tau = 1 , beta=2)": {}}, {})
    assert list(lists) == ["draft-model#small@top-beta(tau=1,beta=2)"]


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("pld@top-bet", "unknown acceptance rule 'top-bet'; did you mean 'top-beta'"),
        ("pld@top-beta(tua=1)", "no setting 'tua'; did you mean 'tau'"),
        ("pld@top-beta(tau=-1)", "setting 'tau': Input should be greater"),
        ("pld@top-beta(1)", "settings are written KEY=VALUE, not '1'"),
        ("plld@top-beta", "unknown method 'plld'; did you mean 'pld'"),
    ],
)
def test_a_rule_that_does_not_exist_is_refused(label: str, said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        swept({label: {}}, {})


def test_a_swept_rule_setting_is_checked() -> None:
    with pytest.raises(BadInput, match="'tau' of pld@top-beta\\(tau=1\\) is swept and set to 1"):
        swept({"pld@top-beta(tau=1)": {}}, {"tau": [2]})
    with pytest.raises(BadInput, match="setting 'tau'"):
        swept({"pld@top-beta": {}}, {"tau": ["much"]})
    with pytest.raises(BadInput, match=r"'cactus' is not among|unknown method 'cactus'"):
        swept({"pld@top-beta": {}}, {"cactus.delta": [1]})
    with pytest.raises(BadInput, match=r"rule 'typical' is not among those of the compared methods; .* pld@typical"):
        swept({"pld": {}}, {"typical.epsilon": [0.1]})


def test_rows_of_rules_from_the_command_line(cli: Run) -> None:
    asked = ("bench", "--limit", "2", "-n", "8", "--json", "-")
    ran = cli(*asked, "--methods", "pld,pld@top-beta(tau=1,beta=2),pld@margin", "--sweep", "margin.theta=0.5,0.9",
              "--quality")  # fmt: skip
    assert ran.code == 0, ran.err
    rows = {row["method"]: (row["lossless"], row["lossy"]) for row in json.loads(ran.out)["methods"]}
    assert list(rows) == ["none", "pld", "pld@top-beta(tau=1,beta=2)", "pld@margin(theta=0.5)", "pld@margin(theta=0.9)"]
    assert rows["pld"] == (True, None)
    assert rows["pld@margin(theta=0.5)"] == (False, "margin(theta=0.5)")
    refused(cli(*asked, "--methods", "pld@margin", "--lossless"), "rule 'margin' is lossy")
    refused(cli("generate", "x", "--method", "pld@margin", "--lossless"), "rule 'margin' is lossy")
    # Lossless as it was typed, and lossy by what a sweep makes of it.
    label, sweep = "pld@top-beta(tau=0)", "top-beta.criterion=gap,top-k"
    refused(cli(*asked, "--methods", label, "--sweep", sweep, "--lossless"), "rule 'top-beta' is lossy")
    refused(cli(*asked, "--methods", "pld@top-beta(tau=1,tau=0)"), "tau is given twice")


def test_a_part_of_a_method_has_no_rule_of_its_own(cli: Run) -> None:
    ran = cli(
        "bench", "--limit", "1", "-n", "4", "--methods", "cascade", "--param", 'cascade.parts=["pld@margin","sam"]'
    )
    refused(ran, "is part of a method, which judges by one rule of its own; leave out '@margin'")

"""One method in several rows: labels and sweeps, from Python and from the command line."""

from __future__ import annotations

import json

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


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"pld.num_draft_token": [2]}, "no compared method has the setting 'num_draft_token'; did you mean"),
        ({"pkd.num_draft_tokens": [2]}, "unknown method 'pkd'; did you mean 'pld'"),
        ({"rest.num_draft_tokens": [2]}, "'rest' is not among the compared methods; compared: pld, sam"),
        ({"sam.num_draft_tokens": [2]}, "'num_draft_tokens' of sam is swept and set to 3"),
        ({"pld.num_draft_tokens": []}, "give at least one value"),
        ({"pld.num_draft_tokens": "2,4"}, "give at least one value, as a list"),
        ({"pld.num_draft_tokens": ["many"]}, "setting 'num_draft_tokens'"),
        ({"pld.num_draft_tokens": list(range(1, 34))}, "make 34 rows, more than 32"),
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

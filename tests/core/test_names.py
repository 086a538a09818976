from __future__ import annotations

import pytest

from outpace.acceptance.registry import find_rule
from outpace.acceptance.rule_text import rule_text
from outpace.core.names import did_you_mean, nearest, normalised, number_text, unknown

KNOWN = {"pld": "pld", "prompt-lookup": "pld", "suffix-automaton": "sam", "sam": "sam", "eagle": "eagle"}


@pytest.mark.parametrize("name", ["eagle3", "EAGLE-3", "eagle_3", " Eagle 3 "])
def test_spellings_of_one_name_are_equal(name: str) -> None:
    assert normalised(name) == "eagle3"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("prompt_lokup", ["pld"]),
        ("suffix", ["sam"]),  # the beginning of an alias
        ("suffix-decoding", ["sam"]),
        ("eagel", ["eagle"]),
        ("saam", ["sam"]),
        ("xyzzy", []),
        ("", []),
    ],
)
def test_the_nearest_names(name: str, near: list[str]) -> None:
    assert nearest(name, KNOWN) == near


def test_at_most_three_are_suggested_the_nearest_first() -> None:
    assert nearest("alpha1", ["alpha2", "alpha3", "alpha4", "alpha1x", "beta"]) == ["alpha1x", "alpha2", "alpha3"]
    assert did_you_mean("alpha1", ["alpha1x", "alpha2", "alpha3"]) == "did you mean 'alpha1x', 'alpha2' or 'alpha3'?"


def test_what_is_too_long_for_a_name_is_not_compared() -> None:
    name = "pld" * (1 << 20)
    assert nearest(name, ["pld", "sam"]) == []
    said = str(unknown("method", name, ["pld", "sam"]))
    assert "known: pld, sam" in said and len(said) < 200


def test_the_error_suggests_or_lists() -> None:
    assert str(unknown("size", "smal", ["tiny", "small"])) == "unknown size 'smal'; did you mean 'small'?"
    assert str(unknown("size", "vast", ["tiny", "base"])) == "unknown size 'vast'; known: tiny, base"
    said = unknown("method", "suffix", KNOWN, see="outpace methods")
    assert str(said) == "unknown method 'suffix'; did you mean 'sam'? See: outpace methods"
    assert str(unknown("method", "xyzzy", KNOWN, see="outpace methods")).endswith("; known: pld, sam, eagle")
    many = [f"name-{number}" for number in range(40)]
    assert (
        str(unknown("method", "xyzzy", many, see="outpace methods")) == "unknown method 'xyzzy'; see: outpace methods"
    )


def test_numbers_have_as_many_digits_as_tell_them_apart() -> None:
    found = [number_text(one) for one in (1.0, 0.9, 0.5, 1e-5, 0.9999999, 1e6, 123456.7)]
    assert found == ["1", "0.9", "0.5", "1e-05", "0.9999999", "1e+06", "123456.7"]
    assert find_rule("margin", {"theta": 0.9999999}).described != find_rule("margin", {"theta": 1}).described
    assert rule_text("margin", {"theta": 0.9999999}) == "margin(theta=0.9999999)"

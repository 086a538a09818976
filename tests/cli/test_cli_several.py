"""outpace generate with several answers: --n, --best-of, --num-beams."""

from __future__ import annotations

import json

import pytest

from cli_support import Run, refused

PROMPT = "abc abc"


def test_beams_as_json_and_as_text(cli: Run) -> None:
    ran = cli("generate", PROMPT, "--num-beams", "3", "--n", "2", "--max-new-tokens", "9", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["method"] == "none"
    assert len(found["answers"]) == 2
    assert [len(one["population"]) for one in found["answers"]] == [3, 3]
    assert found["answers"][0]["score"] >= found["answers"][1]["score"]
    shown = cli("generate", PROMPT, "--num-beams", "3", "--num-return-sequences", "2", "--max-new-tokens", "9")
    assert shown.out == "".join(one["text"] + "\n" for one in found["answers"])
    assert "answer 1 of 2 (score" in shown.err


def test_samples_and_the_best_of_them(cli: Run) -> None:
    sampled = ("--temperature", "1", "--seed", "3", "--max-new-tokens", "9", "--method", "none", "--json")
    every = json.loads(cli("generate", PROMPT, "--n", "4", *sampled).out)["answers"]
    assert [one["seed"] for one in every] == [3, 4, 5, 6]
    best = json.loads(cli("generate", PROMPT, "--best-of", "4", *sampled).out)["answers"]
    assert len(best) == 1
    assert best[0]["text"] in {one["text"] for one in every}


@pytest.mark.parametrize("several", [("--n", "2"), ("--best-of", "2")])
def test_a_lossy_rule_is_named_under_the_answers(cli: Run, several: tuple[str, ...]) -> None:
    given = ("generate", PROMPT, "--method", "pld", "-t", "1", "--seed", "3", "--max-new-tokens", "9", *several)
    assert ", lossy: margin(theta=0.9), seed 3" in cli(*given, "--rule", "margin").err
    assert "lossy" not in cli(*given).err


PARTICLES = ("--method", "smcsd", "--draft-model", "small", "-t", "1", "--seed", "3", "--max-new-tokens", "9", "--json")


@pytest.mark.parametrize("several", [(), ("--n", "1")])
def test_particles_and_their_weights_are_printed(cli: Run, several: tuple[str, ...]) -> None:
    ran = cli("generate", PROMPT, *PARTICLES, *several)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    [answer] = found["answers"] if several else [found]
    assert len(answer["population"]) == 8
    assert answer["population"][0]["tokens"] == answer["tokens"]
    assert answer["population"][0]["score"] == answer["score"]
    assert sum(one["score"] for one in answer["population"]) == pytest.approx(1.0)
    assert "population" not in json.loads(cli("generate", PROMPT, "--json").out)


@pytest.mark.parametrize("several", [(), ("--n", "1")])
def test_a_weight_of_zero_is_null_in_json(cli: Run, several: tuple[str, ...]) -> None:
    ran = cli("generate", PROMPT, *PARTICLES, "--top-k", "6", "--param", "smcsd.ess_threshold=0", *several)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    [answer] = found["answers"] if several else [found]
    excluded = [one for one in answer["population"] if one["log_weight"] is None]
    assert excluded
    assert all(one["score"] == 0.0 for one in excluded)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num-beams", "2", "--n", "3"), "n=3 answers of num_beams=2"),
        (("--n", "2"), "n=2 at temperature 0"),
        (("--num-beams", "2", "--explain"), "--explain is for single answers"),
        (("--num-beams", "2", "--early-stopping", "maybe"), "--early-stopping must be true, false or never"),
        (("--num-beams", "0"), "num_beams must be between 1"),
        (("--num-beams", "2", "--method", "pld"), "'pld' drafts for one sequence"),
    ],
)
def test_bad_input_is_one_line(cli: Run, words: tuple[str, ...], said: str) -> None:
    refused(cli("generate", PROMPT, *words), said)

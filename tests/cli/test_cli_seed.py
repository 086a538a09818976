"""--seed: drawn and shown where it is not given, and repeated where it is; benchmarks keep theirs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cli_support import Run, refused

SAMPLED = ("-n", "20", "-t", "1", "--method", "none")


def test_generate_draws_a_seed_and_shows_it(cli: Run) -> None:
    found = [json.loads(cli("generate", "abc", "--json", *SAMPLED).out) for _ in range(3)]
    assert len({one["metrics"]["seed"] for one in found}) == 3
    again = json.loads(cli("generate", "abc", "--json", *SAMPLED, "--seed", str(found[0]["metrics"]["seed"])).out)
    assert again["text"] == found[0]["text"]
    ran = cli("generate", "abc", *SAMPLED)
    shown = re.search(r"seed (\d+)", ran.err)
    assert shown is not None
    assert cli("generate", "abc", *SAMPLED, "--seed", shown[1]).out == ran.out


def test_chat_shows_it_too(cli: Run) -> None:
    ran = cli("chat", *SAMPLED, stdin="one\ntwo\n")
    assert len(set(re.findall(r"seed (\d+)", ran.err))) == 2
    assert set(re.findall(r"seed (\d+)", cli("chat", *SAMPLED, "--seed", "7", stdin="one\ntwo\n").err)) == {"7"}


def test_greedy_answers_need_none(cli: Run) -> None:
    assert json.loads(cli("generate", "abc", "-n", "4", "--json").out)["metrics"]["seed"] is None
    assert "seed" not in cli("generate", "abc", "-n", "4").err


def test_benchmarks_have_a_fixed_one(cli: Run, tmp_path: Path) -> None:
    seeds = []
    for number in range(2):
        file = tmp_path / f"{number}.json"
        ran = cli("bench", "--methods", "none", "--limit", "2", "-n", "6", "-t", "1", "--json", str(file))
        assert ran.code == 0, ran.err
        seeds.append(json.loads(file.read_text())["settings"]["seed"])
    assert seeds == [0, 0]


def test_a_seed_is_a_whole_number(cli: Run) -> None:
    refused(cli("generate", "abc", "--seed", "x"), "seed")

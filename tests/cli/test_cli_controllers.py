"""``outpace controllers``, and ``--controller`` on generate and bench."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import Run

NAMES = {"smart", "sv", "gamma-star", "entropy", "acceptance-ema", "fallback", "learned-stop", "oracle"}


def test_the_list_names_them_all(cli: Run) -> None:
    ran = cli("controllers", "--json")
    assert ran.code == 0
    assert {one["name"] for one in json.loads(ran.out)} >= NAMES
    shown = cli("controllers")
    assert all(name in shown.out for name in NAMES)
    assert "threshold" in cli("controllers", "adaedl").out


def test_generate_says_which_controller_decided(cli: Run) -> None:
    ran = cli("generate", "what is this?", "--method", "pld", "--controller", "Gamma_Star", "-n", "8", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["metrics"]["controller"] == "gamma-star"
    plain = cli("generate", "what is this?", "--method", "pld", "-n", "8", "--json")
    assert json.loads(plain.out)["metrics"]["controller"] is None
    assert json.loads(plain.out)["tokens"] == json.loads(ran.out)["tokens"]


def test_bench_takes_one_for_all_its_methods(cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    for name in ("oracle", "smart"):
        ran = cli("bench", "--methods", "pld,sam", "--controller", name, "--limit", "2", "-n", "8", "--json", str(file))
        assert ran.code == 0, ran.err
        found = json.loads(file.read_text())
        assert found["settings"]["controller"] == {"name": name, "settings": {}}
        assert all(row["error"] is None for row in found["methods"])


def test_what_does_not_exist_or_fit_is_refused_in_one_line(cli: Run) -> None:
    asked = ("generate", "what?", "--method", "pld", "-n", "4")
    for words, said in (
        (("--controller", "smrt"), "did you mean 'smart'?"),
        (("--controller", "entropy"), "does not fit method 'pld'"),
        (("--controller", "oracle"), "for 'outpace bench' alone"),
        (("--controller", "smart", "--controller-param", "depth=3"), "setting 'depth'"),
        (("--controller", "smart", "--controller-param", "depth"), "takes KEY=VALUE"),
        (("--controller-param", "max_draft_tokens=3"), "is for --controller"),
    ):
        ran = cli(*asked, *words)
        assert ran.code == 2
        assert said in ran.err
        assert ran.err.count("error:") == 1

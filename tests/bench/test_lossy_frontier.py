"""benchmarks/lossy_frontier.py: the study of lossy rules, which is resumable, and its tables."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lossy_frontier
import outpace
from cli_support import toy
from lossy_tables import SCRIPT
from outpace.acceptance.rule_text import rule_from
from page_tables import marks, written

BEGIN, END = marks(SCRIPT)
TEXTS = ("abc abc abc", "xyz xyz", "abd")
PROMPTS = "".join(json.dumps({"prompt": text, "answer": number}) + "\n" for number, text in enumerate(TEXTS))


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(outpace, "load", lambda name, **_: toy(name))
    file = tmp_path / "prompts.jsonl"
    file.write_text(PROMPTS)
    out = str(tmp_path / "out")
    words = (
        "--model toy --methods pld --batch 2 --temperatures 0,1 --max-new-tokens 6 --threads 1 --rules top-beta typical"
    )
    return ["divergence", "--out", out, "--prompts", str(file), *words.split()]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lossy_frontier.py", *words])
    lossy_frontier.main()


def test_every_setting_of_the_study_exists() -> None:
    for rule, settings in lossy_frontier.SWEEPS.items():
        found = [rule_from(f"{rule}({one})") for one in settings]
        assert {one.name for one in found} == {rule}
        assert not any(one.exact for one in found)
        assert all(one.keeps_greedy == (rule not in lossy_frontier.GREEDY) for one in found)


def test_a_study_goes_on_where_it_ended_and_writes_its_tables(
    study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []
    bench: Any = outpace.bench

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return bench(*arguments, **options)

    monkeypatch.setattr(outpace, "bench", counted)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, *study)
    assert len(list((tmp_path / "out").iterdir())) == 1
    run(monkeypatch, *study)
    assert len(calls) == 2 + 3  # two parts of prompts at two temperatures, of which one was done
    run(monkeypatch, *study)
    assert len(calls) == 5
    assert "4 of 4 parts are done" in capsys.readouterr().out
    page = tmp_path / "page.md"
    name = "divergence-toy-pld-t1"
    page.write_text(f"before\n{BEGIN.format(name)}\nold\n{END.format(name)}\nafter\n")
    run(monkeypatch, "table", "--out", str(tmp_path / "out"), "--page", str(page))
    told = capsys.readouterr().out
    assert "divergence-toy-pld-t0\n" in told
    assert "| `pld@top-beta(tau=0.25)` |" in told
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "temperature 1, 3 prompts, up to 6 tokens" in text
    assert "Never faster than the lossless rule beyond the noise" in text
    assert text.count("| `pld@typical(") == 4
    assert "On the frontier, and faster than the lossless rule and than autoregressive decoding" in text
    assert "seen-toy\n" in told  # over both temperatures
    seen = [line for line in told.splitlines() if line.startswith(("| `typical` |", "| `top-beta` |"))]
    assert [line.split(" | ")[:2] for line in seen] == [
        ["| `top-beta`", "pld, T 0"],
        ["| `top-beta`", "pld, T 1"],
        ["| `typical`", "pld, T 1"],
    ]
    assert all("faster" in line or "no gain shown" in line for line in seen)


def test_a_run_of_bounded_time_ends_with_all_rows_on_the_same_prompts(
    study: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock moves by a minute in each bench. What is warm is not warmed up again."""
    now, warmed = [0.0], []
    bench: Any = outpace.bench

    def slow(*arguments: Any, **options: Any) -> Any:
        now[0] += 60.0
        warmed.append(options.get("warmup_tokens"))
        return bench(*arguments, **options)

    monkeypatch.setattr(outpace, "bench", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    at = study.index("--batch")
    words = [*study[:at], *study[at + 2 :], "--max-minutes", "4.5"]  # 3 prompts at 2 temperatures: 6 parts
    run(monkeypatch, *words)
    assert "the next part would end after 4.5 minutes" in capsys.readouterr().out
    assert warmed == [8, 8, 0, 0]
    run(monkeypatch, "table", "--out", study[2])
    told = capsys.readouterr().out
    assert told.count(" 2 prompts, up to 6 tokens") == 2
    assert told.count("| `pld@typical(") == 4
    run(monkeypatch, *words)
    assert "4 of 6 parts are done" in capsys.readouterr().out
    assert len(warmed) == 6
    run(monkeypatch, "table", "--out", study[2])
    assert capsys.readouterr().out.count(" 3 prompts, up to 6 tokens") == 2


def test_scores_have_their_own_table(
    study: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lossy_frontier, "SCORED", ("pld", "pld@margin(theta=0.9)"))
    run(monkeypatch, "scores", *study[1 : study.index("--methods")], "--max-new-tokens", "6", "--threads", "1")
    run(monkeypatch, "table", "--out", study[2])
    told = capsys.readouterr().out
    assert "| `pld@margin(theta=0.9)` |" in told
    assert "0 % of 3" in told
    assert "**line**, 3 prompts:" in told
    results = [json.loads(file.read_text()) for file in Path(study[2]).iterdir()]
    assert all("score" in row["quality"] for result in results for row in result["methods"])


def test_every_set_of_tasks_has_a_table_of_scores(
    study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("gsm8k-test-7", "HumanEval/0", "HumanEval/4")
    rows = [{"prompt": text, "answer": 1, "id": name} for text, name in zip(TEXTS, names, strict=True)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(lossy_frontier, "SCORED", ("pld",))
    words = study[1 : study.index("--methods")]
    words[words.index("--prompts") + 1] = str(file)
    run(monkeypatch, "scores", *words, "--max-new-tokens", "6", "--threads", "1")
    run(monkeypatch, "table", "--out", study[2])
    told = capsys.readouterr().out
    assert "**HumanEval**, 2 prompts:" in told
    assert "**gsm8k-test**, 1 prompts:" in told
    assert told.count("| 0 % of 2 |") == told.count("| 0 % of 1 |") == 2  # none, and pld
    assert "% of 3" not in told


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--max-new-tokens", "5"), "setting 'max_new_tokens' not as in"),
        (("--rules", "margin"), "rows not as in"),
        (("--batch", "3"), r"prompt 'line-\d' stands in"),
    ],
)
def test_parts_of_several_runs_are_not_pooled(
    study: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    reason: str,
) -> None:
    run(monkeypatch, *study, "--temperatures", "0")
    run(monkeypatch, *study, "--temperatures", "0", *more)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "table", "--out", study[2])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert re.search(reason, told)
    assert "give each run its own --out" in told


def test_prompts_of_several_files_have_ids_of_their_own(study: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    at = study.index("--prompts")
    run(monkeypatch, *study[: at + 2], study[at + 1], *study[at + 2 :], "--temperatures", "0", "--limit", "6")
    run(monkeypatch, "table", "--out", study[2])


def test_a_page_without_marks_stays_as_it_is() -> None:
    assert written("text", "study", ["line"], SCRIPT) == "text"
    unclosed = f"text {BEGIN.format('study')} no end"
    assert written(unclosed, "study", ["line"], SCRIPT) == unclosed


def test_a_part_in_which_a_row_failed_is_not_kept(
    study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench: Any = outpace.bench

    def broken(*arguments: Any, **options: Any) -> Any:
        found = bench(*arguments, **options)
        found.rows[1]["error"] = "out of memory"
        return found

    monkeypatch.setattr(outpace, "bench", broken)
    with pytest.raises(SystemExit, match=r"not kept, as rows failed: .*out of memory"):
        run(monkeypatch, *study)
    assert not list((tmp_path / "out").iterdir())

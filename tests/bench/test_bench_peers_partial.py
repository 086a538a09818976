"""bench-peers while it runs, and where it ends early: the JSON file, the printed rows, and that no process remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cli_support import Run
from outpace.bench.peers import comparison as comparing
from outpace.bench.peers.comparison import Comparison
from outpace.bench.peers.entries import Entry
from outpace.bench.peers.observer import Silent
from outpace.bench.peers.peers_report import PeersReport
from outpace.bench.peers.round_robin import RoundRobin
from outpace.bench.peers.stopping import Stopped, TimeLimit
from peers_support import QUESTIONS, comparison_of, fake, plan_of
from test_cli_bench import strict

COMMAND = ("bench-peers", "--model", "some/model", "--peers", "transformers", "--limit", "4", "--threads", "1")


def started(monkeypatch: pytest.MonkeyPatch, made: Callable[[Any], Comparison]) -> None:
    """Let the command run this comparison instead of the one that it was asked for."""
    monkeypatch.setattr(comparing, "prepare", lambda settings, _: made(settings))


def test_results_so_far_are_told_after_every_row_and_every_prompt(tmp_path: Path) -> None:
    told: list[tuple[str, dict[str, Any]]] = []

    class Noted(Silent):
        def row(self, entry: Entry) -> None:
            told.append((entry.name, {}))

        def results(self, report: PeersReport) -> None:
            told.append(("results", json.loads(report.to_json())))

    plan = plan_of(fake(tmp_path, "a", ours=True), fake(tmp_path, "refuses"), fake(tmp_path, "dies"))
    final = comparison_of(plan).run(Noted()).result
    before = [one for _, one in told if one]
    assert [name for name, _ in told if name != "results"] == ["refuses", "dies", "outpace"]
    assert before[0]["settings"]["prompts"] == len(QUESTIONS)
    assert [row["answers"] for row in (*before[0]["ours"], *before[0]["peers"])] == [{}, {}, {}]
    # At first; "refuses" failed; first prompt; "dies" failed; second and third prompt; outpace finished; fourth prompt.
    assert [one["prompts_answered_by_all"] for one in before] == [0, 0, 1, 1, 2, 3, 3, 4]
    assert not any(one["complete"] for one in before)
    assert final["complete"] is True
    [ours], [_, dies] = before[-2]["ours"], before[-2]["peers"]
    assert list(ours["answers"]) == ["q0", "q1", "q2", "q3"]
    assert ours["prompts"] == 3, "figures cover what all rows have answered"
    assert list(dies["answers"]) == ["q0"]
    assert set(ours["answers"]["q0"]) == {"tokens", "first", "seconds", "ttft_ms"}
    assert ours["answers"]["q0"]["tokens"] == 5


def test_rows_are_printed_as_they_finish_and_the_file_is_whole_each_time(
    cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, seen = tmp_path / "out.json", []

    def look(settings: Any) -> Comparison:
        made = comparison_of(plan_of(fake(tmp_path, "a", ours=True), fake(tmp_path, "refuses")))
        go = RoundRobin.go

        def watched(self: RoundRobin) -> bool:
            seen.append(strict(path.read_text()))
            tell = self.on_change

            def told(entry: Entry | None) -> None:
                tell(entry)
                seen.append(strict(path.read_text()))

            self.on_change = told
            return go(self)

        monkeypatch.setattr(RoundRobin, "go", watched)
        return made

    started(monkeypatch, look)
    ran = cli(*COMMAND, "--json", str(path))
    assert ran.code == 0, ran.err
    assert [one["complete"] for one in seen] == [False] * len(seen)
    assert [one["prompts_answered_by_all"] for one in seen] == [0, 0, 1, 2, 3, 3, 4]
    assert [row["error"] for row in seen[1]["peers"]] == ["FileNotFoundError: no such file"]
    assert strict(path.read_text())["complete"] is True
    rows = [line for line in ran.err.splitlines() if line.startswith("row ")]
    assert rows[0] == "row refuses plain failed: FileNotFoundError: no such file"
    assert rows[1].startswith("row outpace plain toy (toy): ")
    assert rows[1].endswith(", 4 prompts")
    assert "tok/s, TTFT" in rows[1]
    assert len(rows) == 2


def workers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "serve.py" in " ".join(one.cmdline())]


@pytest.mark.parametrize(
    ("number", "who"), [(signal.SIGTERM, "by SIGTERM; "), (signal.SIGINT, "")], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_ends_the_run_and_what_was_measured_is_reported(
    cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, who: str
) -> None:
    """It arrives while a row hangs at its second prompt; the first one counts."""
    started(monkeypatch, lambda _: comparison_of(plan_of(fake(tmp_path, "a", ours=True), fake(tmp_path, "hangs"))))
    log = tmp_path / "log"

    def send() -> None:
        while not (log.exists() and log.read_text().count("hangs/") == 3):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    began = time.monotonic()
    before = signal.getsignal(signal.SIGTERM)
    ran = cli(*COMMAND, "--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html"))
    assert ran.code == 130
    assert time.monotonic() - began < 25, "the one that hangs was not waited for"
    assert ran.err.splitlines()[-1] == f"interrupted: {who}1 of 4 prompts done; the results cover these"
    assert workers() == []
    assert signal.getsignal(signal.SIGTERM) == before
    found = strict((tmp_path / "out.json").read_text())
    name = "SIGTERM" if who else "Ctrl-C"
    assert (found["complete"], found["stopped_by"], found["prompts_answered_by_all"]) == (False, name, 1)
    assert [row["prompts"] for row in (*found["ours"], *found["peers"])] == [1, 1]
    note = f"Partial results: {name} ended the run. The figures cover the 1 of 4 prompts that every row answered."
    assert note in " ".join(ran.out.split())
    assert note in (tmp_path / "out.html").read_text()


def test_the_time_limit_ends_the_run(cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No row answers twice: the first prompt's answers are shown, and said to be no comparison of all."""
    asked = []

    def made(settings: Any) -> Comparison:
        asked.append(settings.max_minutes)
        # The run has a limit as soon as the row that hangs is at it; before, the machine may be slow.
        one = comparison_of(plan_of(fake(tmp_path, "a", ours=True), fake(tmp_path, "hangs")), max_minutes=0.5)
        log, clock = tmp_path / "log", one.limit.clock
        one.limit.clock = lambda: clock() + (29 if log.exists() and log.read_text().count("hangs/") == 3 else 0)
        one.limit.began = clock()
        return one

    started(monkeypatch, made)
    ran = cli(*COMMAND, "--json", str(tmp_path / "out.json"), "--max-minutes", "0.5")
    assert asked == [0.5]
    assert ran.code == 130
    assert "interrupted: by --max-minutes 0.5; " in ran.err
    assert workers() == []
    assert strict((tmp_path / "out.json").read_text())["stopped_by"] == "--max-minutes 0.5"
    assert "--max-minutes 0.5 ended the run" in ran.out


def test_answers_to_the_first_prompt_are_shown_where_no_row_has_more(tmp_path: Path) -> None:
    comparison = comparison_of(plan_of(fake(tmp_path, "a", ours=True), fake(tmp_path, "b")))

    class Impatient(Silent):
        def progress(self, now: Any) -> None:
            if now.done == 1:
                raise KeyboardInterrupt

    report = comparison.run(Impatient())
    assert report.prompts_done == 0
    assert sorted(row["prompts"] for row in report.rows) == [0, 1]
    assert "No prompt was answered by every row" in str(report).replace("\n", " ")


def test_before_any_answer_the_file_has_the_settings_and_the_rows(
    cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started(monkeypatch, lambda _: comparison_of(plan_of(fake(tmp_path, "hangs while loading")), max_minutes=0.01))
    ran = cli(*COMMAND, "--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html"))
    assert ran.code == 130
    assert ran.out == ""
    assert ran.err.splitlines()[-1] == "interrupted: by --max-minutes 0.01; no prompt was finished, nothing is reported"
    found = strict((tmp_path / "out.json").read_text())
    assert found["settings"]["prompts"] == 4
    assert [(row["name"], row["answers"]) for row in found["peers"]] == [("hangs while loading", {})]
    assert not (tmp_path / "out.html").exists()


def test_a_second_ctrl_c_does_not_lose_what_was_measured(
    cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It arrives while the final figures are computed."""
    started(monkeypatch, lambda _: comparison_of(plan_of(fake(tmp_path, "a", ours=True), fake(tmp_path, "b"))))
    go = RoundRobin.go

    def interrupted(self: RoundRobin) -> bool:
        go(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(RoundRobin, "go", interrupted)
    ran = cli(*COMMAND, "--json", str(tmp_path / "out.json"))
    assert ran.err.splitlines()[-1] == "interrupted: 4 of 4 prompts done; the results cover these"
    found = strict((tmp_path / "out.json").read_text())
    assert [row["prompts"] for row in (*found["ours"], *found["peers"])] == [4, 4]
    assert found["complete"] is False


def test_the_time_limit_counts_from_its_beginning() -> None:
    now = [100.0]
    limit = TimeLimit(0.5, lambda: now[0])
    limit.check()
    assert limit.left == 30
    now[0] += 31
    assert limit.left == 0
    with pytest.raises(Stopped, match=r"--max-minutes 0\.5"):
        limit.check()
    assert TimeLimit().left == float("inf")


def test_sigkill_leaves_the_last_json_and_no_worker(tmp_path: Path) -> None:
    """Workers notice that the runner is gone, also in the middle of an answer that takes a minute."""
    code = f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(__file__).parent)]!r}
        from pathlib import Path
        from outpace.bench.peers import comparison
        from outpace.cli import main
        from peers_support import comparison_of, fake, plan_of
        place = Path({str(tmp_path)!r})
        plan = plan_of(fake(place, "a", ours=True), fake(place, "hangs"))
        comparison.prepare = lambda *_: comparison_of(plan)
        main({[*COMMAND, "--json", str(tmp_path / "out.json")]!r})
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.DEVNULL) as run:
        log, until = tmp_path / "log", time.monotonic() + 60
        while not (log.exists() and log.read_text().count("hangs/") == 3):
            assert run.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        started = psutil.Process(run.pid).children(recursive=True)
        assert len(started) == 2
        run.kill()
    _, left = psutil.wait_procs(started, timeout=15)
    assert left == []
    found = strict((tmp_path / "out.json").read_text())
    assert (found["complete"], found["prompts_answered_by_all"]) == (False, 1)
    assert [list(row["answers"]) for row in (*found["ours"], *found["peers"])] == [["q0"], ["q0"]]

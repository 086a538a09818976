"""benchmarks/simulator_check.py: its table says what was measured and fitted, and goes into a page."""

from __future__ import annotations

from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

import simulator_check
from cells import read_cells
from machine_pace import at_pace, pace
from outpace.core.errors import BadInput
from outpace.targets.costs import FixedCosts
from outpace.targets.table import TableTarget
from outpace.traces.trace_format import Rounds, TracedRequest, TraceHeader
from outpace.traces.trace_writer import write_trace

HEADER = TraceHeader({"name": "smollm2"}, "open", 1, "serve", "0")


def cell(method: str, batch: int, fitted: bool, off: float) -> dict[str, Any]:
    figures = dict.fromkeys(simulator_check.FIGURES, 100.0)
    return {
        **{"model": "smollm2", "method": method, "batch": batch, "fitted": fitted, "pause": 0.002 * batch, "pace": 1.1},
        "machine": {"measured": ["seconds of forwards"], "fitted": ["rounds take 1.2 times as long"]},
        **{"measured": figures, "predicted": {name: one * off for name, one in figures.items()}},
    }


def test_the_table_says_what_was_fitted(tmp_path: Path) -> None:
    cells = [cell("none", 1, True, 3.0), cell("pld", 1, False, 1.05), cell("pld", 2, False, 0.8)]
    text = simulator_check.table(cells)
    assert "none (fitted)" in text
    assert "| tokens_per_second | 12.5 % | 50 % of 2 |" in text, "the fitted cell is left out"
    assert text.count("Fitted, smollm2: rounds take 1.2 times as long.") == 1
    assert "Measured beforehand, smollm2: seconds of forwards." in text
    assert "smollm2, batch 1: 2.0 ms; smollm2, batch 2: 4.0 ms" in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{simulator_check.MARK}\nold\n{simulator_check.END}\nafter\n")
    simulator_check.page(page, cells)
    simulator_check.page(page, cells)
    assert page.read_text() == f"before\n{simulator_check.MARK}\n\n{text}\n\n{simulator_check.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(BadInput, match="to write between"):
        simulator_check.page(page, cells)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> int:
    command = ["simulator_check.py", "--out", str(out), "--methods", "none,pld", "--batches", "1", *more]
    monkeypatch.setattr("sys.argv", command)
    return simulator_check.main()


def test_cells_of_other_settings_are_not_mixed_and_a_failed_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(options: Any, model: Any, wanted: Any, *_: Any) -> dict[str, Any]:
        if wanted[1] == "pld" and options.tokens == 8 and not works:
            raise RuntimeError("1 requests failed")
        return cell(wanted[1], wanted[2], False, 1.0)

    works: list[bool] = []
    monkeypatch.setattr(simulator_check, "cell", measured)
    monkeypatch.setattr("simulator_check.outpace.load", lambda name: None)
    monkeypatch.setattr("simulator_check.torch.set_num_threads", lambda count: None)
    out = tmp_path / "cells.jsonl"
    assert run(monkeypatch, out, "--tokens", "8") == 1
    works.append(True)
    assert run(monkeypatch, out, "--tokens", "8") == 0
    assert run(monkeypatch, out, "--tokens", "9", "--requests", "3") == 2
    assert "holds cells with another requests, tokens; name another file" in capsys.readouterr().err
    (tmp_path / "prompts.txt").write_text("Why?")
    assert run(monkeypatch, out, "--tokens", "8", "--prompts", str(tmp_path / "prompts.txt")) == 2
    assert "another prompts" in capsys.readouterr().err
    assert len(read_cells(out)) == 2


def test_the_page_of_the_documentation_has_the_marks() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    assert simulator_check.MARK in text and simulator_check.END in text


def test_a_slower_machine_s_times_count_as_at_the_pace_of_the_costs() -> None:
    rounds = Rounds((0, 3), (0, 2), (1, 3), (1, 1), (6.0, 9.0), (0.0, 3.0))
    one = TracedRequest("q", "sam", 9, 4, rounds, arrival=3.0, first_token=1.5, seconds=4.5)
    found = at_pace(one, 1.5)
    assert (found.arrival, found.first_token, found.seconds) == pytest.approx((2.0, 1.0, 3.0))
    assert found.rounds == Rounds((0, 3), (0, 2), (1, 3), (1, 1), (4.0, 6.0), (0.0, 2.0))
    assert at_pace(TracedRequest("q", "sam", 9, 4, rounds), 2.0).seconds is None


def test_the_pace_is_that_of_forwards_beside_their_costs() -> None:
    class Twice(FixedCosts):
        """Costs of a machine on which a forward takes a millisecond."""

        def seconds(self, rows: int, context: int = 0) -> float:
            return 0.001

    class Slow(TableTarget):
        """One on which it takes three."""

        def score(self, *given: Any, **named: Any) -> Any:
            sleep(0.003)
            return super().score(*given, **named)

    target = Slow(5)
    target.__dict__["costs"] = Twice()
    assert 3.0 <= pace(target) < 9.0


def test_traces_are_kept_and_cells_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[tuple[str, int]]()

    def served(options: Any, model: str, draft: Any, method: str, batch: int, trace: Path) -> None:
        asked.append((method, batch))
        rounds = Rounds((0,) * 8, (0,) * 8, (1,) * 8, (1,) * 8, (4.0,) * 8, (0.0,) * 8)
        made = [
            TracedRequest(str(at), method, 20, 8, rounds, arrival=0.1 * at, first_token=0.05, seconds=0.09)
            for at in range(6)
        ]
        write_trace(trace, HEADER, made)

    def simulated(options: Any, model: Any, wanted: Any, draft: Any, batches: Any) -> dict[str, Any]:
        name, method, batch = wanted
        trace, slower = simulator_check.trace_of(options, model, name, draft, method, batch)
        assert slower == 2.0 and len(trace.requests) == 5, "without the warm-up"
        assert trace.requests[0].seconds == pytest.approx(0.045)
        return cell(method, batch, False, 1.0)

    monkeypatch.setattr(simulator_check, "served", served)
    monkeypatch.setattr(simulator_check, "pace", lambda target: 2.0)
    monkeypatch.setattr(simulator_check, "cell", simulated)
    monkeypatch.setattr("simulator_check.outpace.load", lambda name: SimpleNamespace(target=None))
    monkeypatch.setattr("simulator_check.torch.set_num_threads", lambda count: None)
    out = tmp_path / "cells.jsonl"
    assert run(monkeypatch, out) == 0
    assert asked == [("none", 1), ("pld", 1)]
    assert run(monkeypatch, out, "--again") == 0
    assert len(asked) == 2, "no server is started twice"
    assert len(read_cells(out)) == 2
    assert run(monkeypatch, out, "--table", "--beside", str(tmp_path / "none.jsonl")) == 2
    assert "no file" in capsys.readouterr().err

"""Progress as it is shown: a bar on a terminal, lines at growing intervals elsewhere; the figures in both."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outpace.cli import output
from outpace.cli.bars import Bars, duration, rate
from outpace.core.progress import reporting, stage


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_lines_at_growing_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with reporting(Bars(Console(file=io.StringIO()), clock)), stage("training", unit="steps") as at:
        for second in range(301):
            clock.now = second
            at.move(20 + second, 620, f"loss {second}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "training ...",
        "training: 5%, 30 of 620 steps, 1.0 steps/s, 0:10 elapsed, about 9:50 left; loss 10",
        "training: 15%, 90 of 620 steps, 1.0 steps/s, 1:10 elapsed, about 8:50 left; loss 70",
        "training: 24%, 150 of 620 steps, 1.0 steps/s, 2:10 elapsed, about 7:50 left; loss 130",
        "training: 44%, 270 of 620 steps, 1.0 steps/s, 4:10 elapsed, about 5:50 left; loss 250",
        "training: ended after 5:00, 320 steps",
    ]


def test_time_before_the_first_count_is_not_in_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with reporting(Bars(Console(file=io.StringIO()), clock)), stage("benchmark", unit="answers") as at:
        at.move(0, 10, "loading")
        for done in range(7):  # loading took 100 seconds, each answer takes 10
            clock.now = 100.0 + 10 * done
            at.move(done, 10, "chat")
    last = capsys.readouterr().err.splitlines()[-2]
    assert last == "benchmark: 60%, 6 of 10 answers, 6.0 answers/min, 2:40 elapsed, about 0:40 left; chat"


def test_short_stages_leave_a_log_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting(Bars(Console(file=io.StringIO()), Clock())):
        with stage("loading", brief=True) as at:
            at.move(1)
        with pytest.raises(KeyError), stage("conversion", 3, "tensors") as at:
            raise KeyError
    assert capsys.readouterr().err == "conversion ...\n"


def test_inner_stages_are_shown_only_within_others(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    with reporting(Bars(Console(file=screen, force_terminal=True, width=80, color_system=None))):
        with stage("measuring costs", brief=True, inner=True) as at:
            at.move(1)
        assert screen.getvalue() == ""
        with stage("benchmark"), stage("measuring costs", brief=True, inner=True):
            pass
    assert "measuring costs" in screen.getvalue()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_gets_one_line_that_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock, screen = Clock(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    with reporting(Bars(console, clock)), stage("answering prompts", 4000, "tokens") as at:
        at.move(0)
        clock.now = 65.0
        at.move(1000, detail="translation, a detail that is longer than any terminal is wide, which is cut")
        assert output.err() is console  # lines that are printed meanwhile appear above the bar
        with stage("loading", brief=True):
            pass
    shown = screen.getvalue()
    assert "1,000/4,000 tokens 15.4/s 1:05 elapsed" in shown
    assert ("3:15 left" in shown) is (width == 100)
    assert output.err() is not console


def test_nothing_is_shown_without_a_reporter(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("work", 2, "parts") as at:
        at.move(1)
        assert (at.done, at.total) == (1, 2)
    assert capsys.readouterr() == ("", "")


def test_rates_and_times_are_short() -> None:
    shown = [rate(one, "prompts") for one in (1234.0, 12.0, 0.103, 0.001)]
    assert shown == ["1,234 prompts/s", "12.0 prompts/s", "6.2 prompts/min", "3.6 prompts/h"]
    assert rate(2.5e6, "B") == "2.5 MB/s"
    assert [duration(one) for one in (5.9, 754, 3723)] == ["0:05", "12:34", "1:02:03"]

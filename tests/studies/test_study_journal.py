"""Parts of studies: kept, bounded in time, and gone on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_support import Run, refused, toy
from outpace.core.errors import BadInput
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.studies.registry import StudyContext, find_study, read_settings, run_study
from outpace.studies.study_journal import StudyJournal, StudyPaused
from outpace.studies.study_report import StudyReport


class Clock:
    """Goes on by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_parts_are_measured_once_and_the_time_is_bounded(tmp_path: Path) -> None:
    said: list[str] = []
    clock, calls = Clock(), []

    def run() -> list[int]:
        journal = StudyJournal(tmp_path / "kept", 2.0, said.append, clock)
        journal.open({"study": "x"})
        journal.plan({"first": 1.0, "second": 1.0, "third": 4.0})

        def work(number: int) -> int:
            calls.append(number)
            clock.now += 90.0
            return number

        found = [
            journal.part(name, lambda number=number: work(number))  # type: ignore[misc]
            for number, name in enumerate(("first", "second", "third"))
        ]
        assert journal.earlier_seconds == 180.0
        return found

    with pytest.raises(StudyPaused, match=r"2 of 3 parts done, kept in .*kept; the same command goes on"):
        run()
    assert calls == [0, 1]
    assert said == [
        "1 of 3 parts done (first), 90 s; about 8 min left",
        "2 of 3 parts done (second), 90 s; about 6 min left",
    ]
    assert run() == [0, 1, 2] and calls == [0, 1, 2]


def test_one_part_is_done_however_short_the_time_is(tmp_path: Path) -> None:
    clock = Clock()
    journal = StudyJournal(tmp_path / "kept", 1e-9, clock=clock)
    journal.open({})
    clock.now = 5.0
    assert journal.part("first", lambda: clock.__setattr__("now", 10.0)) is None
    with pytest.raises(StudyPaused):
        journal.part("second", lambda: None)
    journal.check()  # what keeps a state of its own has a minute to get on
    clock.now = 61.0
    with pytest.raises(StudyPaused):
        journal.check()


def test_folders_of_something_else_are_refused(tmp_path: Path) -> None:
    StudyJournal(tmp_path / "kept").open({"study": "x", "seed": 1})
    with pytest.raises(BadInput, match="with another seed; name another folder"):
        StudyJournal(tmp_path / "kept").open({"study": "x", "seed": 2})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear")
    with pytest.raises(BadInput, match="holds other files"):
        StudyJournal(tmp_path / "mine").open({"study": "x"})
    again = StudyJournal(tmp_path / "kept")
    again.open({"study": "x", "seed": 1})
    again.part("first", lambda: 1)
    [part] = (tmp_path / "kept").glob("*.part.json")
    part.write_text('{"value":')
    with pytest.raises(BadInput, match="delete the file"):
        again.part("first", lambda: 1)
    with pytest.raises(BadInput, match="needs --keep"):
        StudyJournal(None, 3.0)
    with pytest.raises(BadInput, match="above 0"):
        StudyJournal(tmp_path, 0.0)


def test_parts_of_another_precision_or_device_are_not_taken(tmp_path: Path) -> None:
    ran: list[str] = []

    def measure(context: StudyContext, settings: Any) -> Any:
        ran.append(context.model.info["dtype"])
        raise StudyPaused

    one = replace(find_study("illusion"), run=measure)

    def run(**info: Any) -> None:
        model = toy()
        model.info.update(info)
        about = StudyContext("toy", load_prompts(limit=1), lambda *_: model, journal=StudyJournal(tmp_path / "kept"))
        run_study(one, about, read_settings(one, {}))

    for _ in range(2):
        with pytest.raises(StudyPaused):
            run()
    for name, value in (("dtype", "int8"), ("device", "cuda"), ("target", "HFTarget")):
        with pytest.raises(BadInput, match=f"parts of a study with another {name}; name another folder"):
            run(**{name: value})
    assert ran == ["float32", "float32"]


def test_what_does_not_fit_is_refused_before_anything_runs(cli: Run, tmp_path: Path) -> None:
    refused(cli("study", "moesd", "--keep", str(tmp_path / "a")), "keeps no parts", "illusion")
    refused(cli("study", "illusion", "--max-minutes", "1"), "needs --keep")
    refused(cli("study", "illusion", "--keep", str(tmp_path / "a" / "b")), "there is no folder")
    (tmp_path / "file").write_text("")
    refused(cli("study", "illusion", "--keep", str(tmp_path / "file")), "that is a file")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


SMALL: dict[str, dict[str, Any]] = {
    "illusion": {"methods": ["pld"], "batches": [1, 2], "max_new_tokens": 8},
    "context": {"methods": ["sam"], "contexts": [200, 400], "texts": 2, "repeat": 1, "max_new_tokens": 6},
    "kvshot": {"tokens": 300, "steps": 2, "answer_tokens": 24, "vocabulary": 256, "max_new_tokens": 8},
    "sdsl": {
        **{"sizes": ["1:tiny", "1:small", "2:tiny"], "candidates": ["2:small"], "tokens": 300, "answer_tokens": 24},
        **{"vocabulary": 256, "timed": 2, "max_new_tokens": 6, "longest": 2},
    },
}


@pytest.mark.model
@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.slow
def test_a_study_that_is_ended_again_and_again_comes_to_its_end(name: str, smollm2: Model, tmp_path: Path) -> None:
    """Each run does one part; the last one finds what all have measured."""
    one = find_study(name)
    said: list[str] = []

    def run(minutes: float | None) -> StudyReport:
        journal = StudyJournal(tmp_path / "kept", minutes, said.append)
        about = StudyContext("smollm2", load_prompts(limit=3), lambda *_: smollm2, journal=journal)
        return run_study(one, about, read_settings(one, SMALL[name]))

    pauses = 0
    while pauses < 60:
        try:
            found = run(1e-9)
            break
        except StudyPaused as pause:
            pauses += 1
            assert "the same command goes on" in str(pause)
    parts = sorted((tmp_path / "kept").glob("*.part.json"))
    assert pauses == len(parts) - 1 >= 1
    assert len(said) == len(parts), "no part was measured twice"
    again = run(None)
    assert len(said) == len(parts)
    assert again.result["rows"] == found.result["rows"]

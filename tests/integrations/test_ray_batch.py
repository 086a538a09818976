"""Offline batches: rows, the journal that survives kills, and passes that lose blocks, without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from cli_support import toy
from outpace.constraints import Grammar
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.integrations.ray.batch_answers import REFUSAL, Answers, BatchWorker
from outpace.integrations.ray.batch_journal import Journal, journal_path
from outpace.integrations.ray.batch_rows import Row, read_rows
from outpace.integrations.ray.batch_run import LOST, run_batch

ABOUT = {"input": "digest", "model": "toy"}


def written(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(b"".join((one.encode() if isinstance(one, str) else one) + b"\n" for one in lines))
    return path


def rows(count: int) -> list[Row]:
    return [Row(line, f"id{line}", f"prompt {line}") for line in range(1, count + 1)]


def answer(row: Row) -> dict[str, Any]:
    return {"id": row.id, "line": row.line, "text": f"answer {row.line}"}


def output(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_their_settings(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    found = read_rows(
        written(
            tmp_path,
            json.dumps({"id": "a", "prompt": "one", "max_new_tokens": 3}),
            "",
            json.dumps({"messages": messages, "temperature": 0.5, "stop": ["x"]}),
            json.dumps({"id": 7, "prompt": "two"}),
        )
    )
    assert found == [
        Row(1, "a", "one", {"max_new_tokens": 3}),
        Row(3, 3, messages, {"temperature": 0.5, "stop": ["x"]}),  # type: ignore[arg-type]
        Row(4, 7, "two"),
    ]
    assert [Row.from_dict(json.loads(json.dumps(one.as_dict()))) for one in found] == found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "no JSON object"),
        ("{}", "either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "either 'prompt' or 'messages'"),
        ('{"prompt": "  "}', "the prompt is empty"),
        ('{"messages": []}', "the prompt is empty"),
        ('{"prompt": 5}', "'prompt'"),
        ('{"prompt": "a", "temprature": 1}', "'temprature'"),
        ('{"prompt": "a", "temprature": 1}', "a row may have: id, prompt"),
        ('{"prompt": "a", "max_new_tokens": 0}', "'max_new_tokens'"),
        ('{"messages": [{"role": "user"}]}', "'messages.0.content'"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_bad_row_says_why_and_stays_in_its_place(tmp_path: Path, line: str | bytes, said: str) -> None:
    bad, good = read_rows(written(tmp_path, line, '{"prompt": "a"}'))
    assert said in str(bad.error)
    assert (bad.line, bad.id) == (1, 1)
    assert good.error is None


def test_a_bad_row_keeps_its_id_and_an_id_is_used_once(tmp_path: Path) -> None:
    found = read_rows(written(tmp_path, '{"id": "a"}', '{"id": "b", "prompt": "x"}', '{"id": "b", "prompt": "y"}'))
    assert [(one.id, one.error is None) for one in found] == [("a", False), ("b", True), ("b", False)]
    assert "line 2" in str(found[2].error)


def test_files_without_rows(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_rows(tmp_path / "none")
    with pytest.raises(BadInput, match="has no rows"):
        read_rows(written(tmp_path, "", " "))


def test_a_finished_journal_is_the_output_in_the_order_of_the_input(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Journal(out, ABOUT, resume=False) as journal:
        for row in reversed(rows(3)):
            assert journal.add([answer(row)]) == 1
        assert not out.exists()
        journal.finish()
    assert [one["id"] for one in output(out)] == ["id1", "id2", "id3"]
    assert all("line" not in one for one in output(out))
    assert not journal_path(out).exists()


def test_a_result_that_comes_twice_counts_once(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    one, two = rows(2)
    with Journal(out, ABOUT, resume=False) as journal:
        assert journal.add([answer(one)]) == 1
        assert journal.add([answer(one), answer(two)]) == 1
        journal.finish()
    assert len(output(out)) == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), count=st.integers(0, 5))
def test_a_journal_that_was_cut_anywhere_loses_at_most_what_was_cut(tmp_path: Path, cut: int, count: int) -> None:
    out = tmp_path / "out.jsonl"
    journal_path(out).unlink(missing_ok=True)
    out.unlink(missing_ok=True)
    with Journal(out, ABOUT, resume=False) as journal:
        journal.add(answer(row) for row in rows(count))
    whole = journal_path(out).read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    journal_path(out).write_bytes(kept)
    complete = max(0, kept.count(b"\n") - 1)
    with Journal(out, ABOUT, resume=True) as journal:
        assert journal.done == set(range(1, complete + 1))
        journal.add(answer(row) for row in rows(5))
        journal.finish()
    assert [one["id"] for one in output(out)] == [f"id{line}" for line in range(1, 6)]


def test_a_journal_knows_what_is_lossy_about_its_answers_also_after_an_interruption(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    one, two = rows(2)
    with Journal(out, ABOUT, resume=False) as journal:
        assert journal.lossy is None
        journal.add([{**answer(one), "lossy": "margin(theta=0.9)"}])
    with Journal(out, ABOUT, resume=True) as journal:
        journal.add([two.failed("too long")])
        assert journal.lossy == "margin(theta=0.9)"
        journal.finish()
    assert [row.get("lossy") for row in output(out)] == ["margin(theta=0.9)", None]


def test_outputs_and_journals_that_are_there_are_refused_in_words(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(BadInput, match="exists already"):
        Journal(out, ABOUT, resume=True)
    assert out.read_text() == "mine"
    out.unlink()
    with Journal(out, ABOUT, resume=False) as journal:
        journal.add([answer(rows(1)[0])])
    with pytest.raises(BadInput, match="--resume"):
        Journal(out, ABOUT, resume=False)
    with pytest.raises(BadInput, match="another input"):
        Journal(out, {**ABOUT, "input": "changed"}, resume=True)
    with Journal(out, ABOUT, resume=True) as first:
        assert first.done == {1}
        with pytest.raises(BadInput, match="another process"):
            Journal(out, ABOUT, resume=True)
    journal_path(out).write_text("something else\n")
    with pytest.raises(BadInput, match="no journal"):
        Journal(out, ABOUT, resume=True)
    with pytest.raises(BadInput, match="cannot write"):
        Journal(tmp_path / "none" / "out.jsonl", ABOUT, resume=False)


class Losing:
    """A pass in which blocks with these lines come to nothing, in the first ``passes`` passes."""

    def __init__(self, lines: set[int], passes: int) -> None:
        self.lines, self.passes = lines, passes
        self.sizes: list[int] = []

    def __call__(self, given: Sequence[Row], block: int) -> Iterator[list[dict[str, Any]]]:
        self.sizes.append(block)
        lost = self.lines if len(self.sizes) <= self.passes else set()
        for at in range(0, len(given), block):
            part = given[at : at + block]
            if not lost & {row.line for row in part}:
                yield [answer(row) for row in part]


def ran(tmp_path: Path, given: list[Row], compute: Losing) -> list[dict[str, Any]]:
    out = tmp_path / "out.jsonl"
    moved: list[int] = []
    with Journal(out, ABOUT, resume=False) as journal:
        run_batch(given, journal, compute, 4, moved.append)
        journal.finish()
    assert moved == sorted(moved)
    assert moved[-1] == len(given)
    return output(out)


def test_blocks_that_were_lost_are_computed_row_by_row(tmp_path: Path) -> None:
    compute = Losing({3}, passes=1)
    assert [one["text"] for one in ran(tmp_path, rows(10), compute)] == [f"answer {line}" for line in range(1, 11)]
    assert compute.sizes == [4, 1]


def test_a_row_that_brings_every_worker_down_is_the_only_one_without_an_answer(tmp_path: Path) -> None:
    found = ran(tmp_path, rows(10), Losing({3}, passes=9))
    assert [one for one in found if "error" in one] == [{"id": "id3", "line": 3, "error": LOST}]
    assert len(found) == 10


def test_bad_rows_are_in_the_output_and_not_computed(tmp_path: Path) -> None:
    given = [*rows(2), Row(3, "bad", error="no prompt")]
    compute = Losing({3}, passes=0)
    assert ran(tmp_path, given, compute)[2] == {"id": "bad", "line": 3, "error": "no prompt"}
    assert compute.sizes == [4]


def test_a_batch_that_is_refused_before_anything_was_computed_leaves_no_journal(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    def refuse(_: Sequence[Row], __: int) -> Iterator[list[dict[str, Any]]]:
        raise BadInput("the workers do not start")
        yield []

    def refuse_later(left: Sequence[Row], _: int) -> Iterator[list[dict[str, Any]]]:
        yield [answer(left[0])]
        raise BadInput("the workers do not start")

    given = [*rows(3), Row(4, 4, error="no prompt")]
    for passes, kept in ((refuse, False), (refuse_later, True)):
        with pytest.raises(BadInput, match="do not start"), Journal(out, ABOUT, resume=False) as journal:
            run_batch(given, journal, passes, 8, lambda _: None)
        assert journal_path(out).exists() is kept
    with pytest.raises(BadInput), Journal(out, ABOUT, resume=True) as journal:
        run_batch(given, journal, refuse, 8, lambda _: None)
    assert journal_path(out).exists()


@pytest.mark.parametrize(
    ("error", "said"), [(BadInput("unknown model 'x'"), "unknown model 'x'"), (OSError("disk"), "OSError: disk")]
)
def test_a_worker_that_cannot_load_its_model_says_why_in_place_of_results(error: Exception, said: str) -> None:
    def fail() -> Answers:
        raise error

    worker = BatchWorker(fail)
    assert [json.loads(text) for text in worker({"row": ["{}", "{}"]})["result"]] == [{REFUSAL: said}]


def test_the_answers_of_a_worker_are_those_of_the_model() -> None:
    model = toy()
    options = {"max_new_tokens": 8, "params": SamplingParams()}
    worker = BatchWorker(lambda: Answers(model, model.method("pld"), options))
    given = [*rows(3), Row(4, "long", "x" * 500), Row(5, "short", "y", {"max_new_tokens": 2})]
    batch = {"row": [json.dumps(one.as_dict()) for one in given]}
    found = [json.loads(one) for one in worker(batch)["result"]]
    assert [one["id"] for one in found] == [one.id for one in given]
    for row, one in zip(given[:3], found[:3], strict=True):
        expected = model.generate([{"role": "user", "content": row.prompt}], method="pld", max_new_tokens=8)
        assert (one["text"], one["finish_reason"]) == (expected.text, expected.finish_reason)
        assert one["usage"]["completion_tokens"] == len(expected.tokens)
    assert "error" in found[3]
    assert found[4]["usage"]["completion_tokens"] <= 2


def test_rows_name_the_lossy_rule_with_its_settings() -> None:
    model, options = toy(), {"max_new_tokens": 4, "params": SamplingParams()}
    [lossy] = Answers(model, model.method("pld", rule="margin"), options)(rows(1))
    [lossless] = Answers(model, model.method("pld"), options)(rows(1))
    assert lossy["lossy"] == "margin(theta=0.9)"
    assert "lossy" not in lossless


def test_rows_are_held_to_the_grammar_of_the_batch() -> None:
    model = toy()
    options = {"max_new_tokens": 8, "params": SamplingParams(temperature=1.0), "grammar": Grammar.choice(["ab", "ba"])}
    found = Answers(model, model.method("pld"), options)(rows(6))
    assert {one["finish_reason"] for one in found} == {"stop"}
    assert {one["text"] for one in found} <= {"ab", "ba"}
    wrong = Answers(model, model.method("pld"), {**options, "grammar": Grammar.regex("(")})(rows(2))
    assert all("the regular expression cannot be used" in one["error"] for one in wrong)


def test_a_sampled_row_has_its_answer_again_whatever_runs_beside_it() -> None:
    model = toy()
    method = model.method("pld", {"num_draft_tokens": 2})
    answers = Answers(model, method, {"max_new_tokens": 8, "params": SamplingParams(temperature=1.0, seed=5)})
    given = rows(6)
    together = answers(given)
    assert [answers([row])[0] for row in given] == together
    assert [one["seed"] for one in together] == [5 + row.line for row in given]

"""benchmarks/schema_suite.py and benchmarks/grammar_masks.py: what they count, and that a wrong constraint is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import grammar_masks
import outpace
import schema_suite
from outpace.constraints import Grammar, GrammarLimits, compiled, compiler
from outpace.core.lru import Lru
from schema_suite import Case, Walker

pytestmark = pytest.mark.model

LIMITS = GrammarLimits()
AGE = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["age"]}
ROWS: list[dict[str, Any]] = [AGE, {"enum": []}]
CLOSED = {**AGE, "additionalProperties": False}


@pytest.fixture(scope="module")
def model() -> outpace.Model:
    return outpace.load("smollm2")


@pytest.fixture
def suite(model: outpace.Model) -> Any:
    pytest.importorskip("jsonschema")
    walker = Walker(model, seed=1)
    return lambda case: schema_suite.check(case, model, walker, 3, LIMITS)


def test_a_schema_is_counted_with_its_instances_and_random_answers(suite: Any) -> None:
    found = suite(Case("a", CLOSED, [({"age": 3}, True), ({"age": 10}, False), ({}, False)]))
    assert found["outcome"] == "compiled"
    counts = dict(found["instances"])
    assert counts.pop(("trick", "rejected")) == 4 * 10  # of the valid instance and of three answers
    assert counts == {("valid", "accepted"): 1, ("invalid", "rejected"): 2, ("walk", "valid"): 3}
    refused = suite(Case("b", {"not": {"type": "integer"}}))
    assert refused["outcome"] == "refused" and "schema cannot be used" in refused["why"]


def test_a_constraint_that_allows_too_much_is_seen(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wider = {**CLOSED, "properties": {"age": {"type": "integer", "minimum": 10, "maximum": 99}}}
    monkeypatch.setattr(schema_suite, "compiled", lambda _, *rest: compiled(Grammar.schema(wider), *rest))
    by_instance = suite(Case("a", CLOSED, [({"age": 11}, False)]))
    assert by_instance["outcome"] == "wrong" and by_instance["instances"]["invalid", "accepted"] == 1
    by_walk = suite(Case("a", CLOSED))
    assert by_walk["outcome"] == "wrong" and by_walk["instances"]["walk", "wrong"] == 3


def test_tricks_with_keys_are_seen(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine takes them without outpace's own bounds: a key in escapes, and one that is written twice."""
    escaped = Case("a", {"type": "array", "items": AGE}, [([{"age": 3}], True)])
    twice = Case("b", {"type": "object", "minProperties": 2}, [({"a": 1, "b": 2}, True)])
    assert suite(escaped)["outcome"] == "compiled" and suite(twice)["outcome"] == "refused"
    assert suite(escaped)["instances"]["trick", "rejected"] >= 10
    monkeypatch.setattr(compiler, "_ESCAPES", {})
    monkeypatch.setattr(compiler, "check_expressible", lambda _: None)
    monkeypatch.setattr(compiler, "_COMPILED", Lru(8))
    monkeypatch.setattr(compiler, "_REFUSED", Lru(8))
    found = suite(escaped)
    assert found["outcome"] == "wrong" and any("u0061ge" in one for one in found["wrong"])
    found = suite(twice)
    assert found["outcome"] == "wrong" and '{"a": 1, "a": 1}' in found["wrong"]


def test_the_command_counts_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jsonschema")
    tests = [{"data": {"age": 1}, "valid": True}]
    (tmp_path / "one.json").write_text(json.dumps({"schema": CLOSED, "tests": tests}))
    (tmp_path / "two.jsonl").write_text("\n".join(json.dumps({"schema": one}) for one in ROWS))
    (tmp_path / "three.json").write_text("{")
    monkeypatch.setattr("sys.argv", ["schema_suite.py", str(tmp_path), "--walks", "1"])
    assert schema_suite.main() == 0
    said = capsys.readouterr()
    assert "3 schemas, 1 files that are no JSON" in said.out and "'compiled': 2, 'refused': 1" in said.out
    assert said.err.startswith("left out: ")


def test_mask_times_are_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["grammar_masks.py", "--nodes", "1"])
    assert grammar_masks.main() == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.count("49,152 tokens (smollm2): ") == 3
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in grammar_masks.CASES]
    monkeypatch.setattr("sys.argv", ["grammar_masks.py", "--model", "nowhere/none.gguf"])
    assert grammar_masks.main() == 2
    assert capsys.readouterr().err.startswith("error: ")

"""The command line on the embedded model: what users meet first."""

from __future__ import annotations

import json

import pytest

import outpace.loading
from cli_support import Run
from outpace.model import Model

pytestmark = pytest.mark.model


@pytest.fixture
def real(cli: Run, smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> Run:
    """As ``cli``, on the embedded model."""
    monkeypatch.setattr(outpace.loading, "load", lambda *_, **__: smollm2)
    return cli


def test_generate(real: Run, smollm2: Model) -> None:
    ran = real("generate", "Name the three primary colours.", "--temperature", "0", "--max-new-tokens", "12", "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["text"] == smollm2.tokenizer.decode(found["tokens"])
    assert 0 < len(found["tokens"]) <= 12
    assert not smollm2.eos_ids & set(found["tokens"])


def test_explain(real: Run) -> None:
    ran = real("generate", "Repeat: one two three one two three one two", "--explain", "-n", "16", "--method", "pld")
    assert ran.code == 0
    assert "a round" in ran.out
    assert all(len(line) <= 100 for line in ran.out.splitlines())


def test_chat_keeps_what_it_computed(real: Run) -> None:
    ran = real("chat", "-n", "8", stdin="My name is Ada.\nWhat is my name?\n")
    assert ran.code == 0
    assert "prompt tokens reused" in ran.err.splitlines()[-1]


def test_bench(real: Run) -> None:
    ran = real("bench", "--methods", "pld", "--limit", "2", "-n", "8", "--json", "-")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert [row["method"] for row in found["methods"]] == ["none", "pld"]
    assert all(row["error"] is None for row in found["methods"])


def test_a_prompt_longer_than_the_context(real: Run) -> None:
    ran = real("generate", "word " * 10_000)
    assert ran.code == 2
    assert ran.err.startswith("error: the prompt has")

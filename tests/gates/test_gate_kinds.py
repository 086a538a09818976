"""Kinds of gates: found by name in one place; a new one needs its own declaration and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import outpace
from cli_support import toy
from outpace.cli.trained_gate import show_gate
from outpace.core.validation import StrictModel
from outpace.gates.gate_folder import open_gate
from outpace.training.gates import registry
from outpace.training.gates.work import MadeGate, Work


class Options(StrictModel):
    """Settings of a kind of gate that is made up here."""

    limit: float = 0.25


@pytest.fixture
def coin() -> Iterator[None]:
    """A further kind, for as long as a test lasts."""

    @registry.gate(
        "coin",
        options=Options,
        reads_draft=False,
        figures={"prompts": "{} prompts", "missing": "{} of what it does not have"},
        remark=lambda thresholds: "nothing stands" if thresholds["limit"] > 0.4 else None,
    )
    def train(work: Work) -> MadeGate:
        return MadeGate({"limit": 2 * work.options.limit}, {"prompts": 3})

    registry.gate_trainings.cache_clear()
    yield
    del registry._KINDS["coin"]
    registry.gate_trainings.cache_clear()


def test_the_kinds_are_found_by_name() -> None:
    assert {"bild", "pad", "sprinter"} <= set(registry.gate_trainings())
    found = registry.find_gate("Sprinter")
    assert found is not None
    assert found.name == "sprinter"
    assert registry.find_gate("medusa") is None


@pytest.mark.usefixtures("coin")
def test_a_further_kind_is_trained_shown_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = toy()
    made = outpace.train(model, "coin", tmp_path / "gate", draft_model=toy("draft"), options={"limit": 0.4})
    assert made.provenance["thresholds"] == {"limit": 0.8}
    stored = open_gate(made.folder, "coin", 0, model.target, None)
    assert stored.threshold("limit") == 0.8
    assert stored.gate is None
    show_gate(made, "toy")
    told = capsys.readouterr().out
    assert "3 prompts" in told
    assert "does not have" not in told
    assert "nothing stands" in told
    assert "--method coin --param coin.gate=" in told.replace("\n", "")

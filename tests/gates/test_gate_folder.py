"""Gates on disk: what is written is read, and gates of other models and damaged ones are refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace.core.errors import BadInput
from outpace.gates.draft_probe import alike, draft_probe
from outpace.gates.features import ROW_FEATURES, row_features
from outpace.gates.gate import DraftFacts, Gate, GateConfig, random_gate
from outpace.gates.gate_folder import check_new_folder, open_gate, save_gate
from outpace.heads.checkpoint import facts
from outpace.heads.head_config import CONFIG, PROVENANCE, WEIGHTS
from outpace.targets.table import TableTarget

TARGET, DRAFT = TableTarget(40, seed=1), TableTarget(40, seed=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "gate"
    config = GateConfig(
        gate="sprinter",
        target=facts(TARGET, "toy"),
        draft=DraftFacts(name="draft model 'small'", fingerprint=draft_probe(DRAFT)),
        features=ROW_FEATURES,
        hidden=8,
        thresholds={"threshold": 0.75},
    )
    save_gate(config, random_gate(ROW_FEATURES), place, {"command": "outpace train sprinter"})
    return place


def opened(folder: Path, target: TableTarget = TARGET, draft: TableTarget | None = DRAFT) -> Any:
    return open_gate(folder, "sprinter", ROW_FEATURES, target, draft)


def test_what_is_written_is_read(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS, PROVENANCE]
    found = opened(folder)
    assert found.threshold("threshold") == 0.75
    row = row_features(torch.randn(40, generator=torch.Generator().manual_seed(1)).softmax(-1), 3, 2, greedy=False)
    assert found.gate.probability(row) == pytest.approx(random_gate(ROW_FEATURES).probability(row))
    with pytest.raises(BadInput, match="has no threshold 'fallback'"):
        found.threshold("fallback")


def test_thresholds_that_training_cannot_have_chosen_are_refused(folder: Path) -> None:
    for wrong in (-0.5, 1.5):
        changed(folder, thresholds={"threshold": wrong, "rollback": wrong})
        found = opened(folder)
        with pytest.raises(BadInput, match=f"threshold={wrong:g}, which must be between 0 and 1; train it again"):
            found.threshold("threshold")
    assert found.threshold("rollback", 100.0) == 1.5


def test_a_probe_tells_draft_models_apart() -> None:
    assert alike(draft_probe(DRAFT), draft_probe(DRAFT))
    assert not alike(draft_probe(DRAFT), draft_probe(TARGET))
    assert not alike(draft_probe(DRAFT), draft_probe(TableTarget(20, seed=2)))


@pytest.mark.parametrize("other", [TableTarget(40, seed=3), TableTarget(41, seed=1), TableTarget(40, seed=1, layers=5)])
def test_a_gate_of_another_model_is_refused(folder: Path, other: TableTarget) -> None:
    with pytest.raises(BadInput, match="was trained for other weights than this model's \\(toy\\)") as refused:
        opened(folder, other)
    assert "\n" not in str(refused.value)


def test_a_gate_of_another_draft_model_is_refused(folder: Path) -> None:
    with pytest.raises(BadInput, match="was trained for draft model 'small', and this is another draft model"):
        opened(folder, draft=TableTarget(40, seed=9))
    assert opened(folder, draft=None).gate is not None


def changed(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **values}))


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = {name: value.clone() for name, value in load_file(folder / WEIGHTS).items()}
    change(weights)
    save_file(weights, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: changed(folder, gate="pad"), "holds a gate of 'pad', not one of 'sprinter'"),
        (lambda folder: changed(folder, gate=None), "holds no gate, not one of 'sprinter'"),
        (lambda folder: changed(folder, format=2), "is of format 2"),
        (lambda folder: changed(folder, surprise=1), "surprise"),
        (lambda folder: changed(folder, features=3), "reads 3 features"),
        (lambda folder: changed(folder, thresholds={"threshold": "high"}), "thresholds"),
        (lambda folder: (folder / CONFIG).write_text("{"), "cannot be read"),
        (lambda folder: (folder / CONFIG).unlink(), "there is no gate at"),
        (lambda folder: (folder / WEIGHTS).unlink(), "weights cannot be read"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"no"), "weights cannot be read"),
        (lambda folder: rewritten(folder, lambda weights: weights.pop("mean")), "does not hold the tensors"),
        (lambda folder: rewritten(folder, lambda weights: weights["mean"].fill_(float("nan"))), "not finite"),
    ],
)
def test_a_damaged_gate_is_refused_in_one_line(folder: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(folder)
    with pytest.raises(BadInput, match=said) as refused:
        opened(folder)
    assert "\n" not in str(refused.value)


def test_a_folder_that_holds_something_is_not_written_to(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not an empty folder"):
        check_new_folder(folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="is not an empty folder"):
        check_new_folder(tmp_path / "file")
    with pytest.raises(BadInput, match="cannot be written"):
        save_gate(
            GateConfig(gate="bild", target=facts(TARGET, "toy"), thresholds={}), None, tmp_path / "file" / "gate", {}
        )
    check_new_folder(tmp_path / "new")


def test_features_do_not_depend_on_the_vocabulary_and_stay_finite() -> None:
    for size in (3, 8, 50):
        probs = torch.zeros(size)
        probs[1] = 1.0
        for token in (0, 1):
            row = row_features(probs, token, 99, greedy=True)
            assert row.shape == (ROW_FEATURES,)
            assert bool(row.isfinite().all())
    gate = Gate(ROW_FEATURES, 4)
    assert 0.0 <= gate.probability(torch.full((ROW_FEATURES,), 1e6)) <= 1.0

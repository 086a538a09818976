"""benchmarks/average_heads.py: the mean of two heads is a head, and says whose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import average_heads
import outpace
from cli_support import toy
from outpace.core.errors import BadInput
from outpace.heads.head_config import CONFIG, PROVENANCE, WEIGHTS

TOY = toy()


def trained(folder: Path, name: str, *, size: str = "tiny", init: Path | None = None) -> Path:
    prompts = folder / "prompts.jsonl"
    names = ["cat", "dog", "owl", "fox", "bee", "ant"]
    rows = [{"turns": [f"what did the {one} say to the {other}"]} for one in names for other in names if one != other]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    given: dict[str, Any] = {"size": size, "vocabulary": 16} if init is None else {"init": init, "seed": 1}
    outpace.train(
        TOY, "eagle3", folder / name, prompts=[prompts], tokens=300, passages=0.0, batch_tokens=150,
        data=folder / "data", **given,
    )  # fmt: skip
    return folder / name


def test_the_mean_of_two_heads_is_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outpace, "load", lambda name: TOY)
    first = trained(tmp_path, "first")
    second = trained(tmp_path, "second", init=first)
    average_heads.averaged(str(first), str(second), tmp_path / "mean", 0.25, "toy")
    one, other, mean = (load_file(folder / WEIGHTS) for folder in (first, second, tmp_path / "mean"))
    assert mean.keys() == one.keys()
    for name, value in mean.items():
        right = torch.lerp(one[name].float(), other[name].float(), 0.25).to(value.dtype)
        torch.testing.assert_close(value, right if value.is_floating_point() else one[name])
    assert (tmp_path / "mean" / CONFIG).read_bytes() == (first / CONFIG).read_bytes()
    about = json.loads((tmp_path / "mean" / PROVENANCE).read_text())
    begun = json.loads((first / PROVENANCE).read_text())
    assert about["mean"]["share"] == 0.25 and about["mean"]["first"]["command"] == begun["command"]
    assert about["from"]["spent"]["steps"] == begun["steps"]
    method = TOY.method("eagle3", head=tmp_path / "mean")
    assert outpace.generate(TOY, "a cat", method=method, max_new_tokens=8).tokens
    for share, out, said in ((1.0, "other", "--share must be"), (0.5, "mean", "exists; give another folder")):
        with pytest.raises(BadInput, match=said):
            average_heads.averaged(str(first), str(second), tmp_path / out, share, "toy")
    larger = trained(tmp_path, "larger", size="small")
    with pytest.raises(BadInput, match="not of one kind, size and draft vocabulary"):
        average_heads.averaged(str(first), str(larger), tmp_path / "other", 0.5, "toy")
    assert not (tmp_path / "other").exists()

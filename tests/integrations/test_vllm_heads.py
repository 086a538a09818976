"""Heads for vLLM: exported once, and a warning where one names another model than the one that is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from layouts_support import head_of, target, written
from outpace.core.errors import BadInput
from outpace.heads.exchange import HUB
from outpace.heads.head_folder import open_head
from outpace.integrations.vllm.exported_head import _files_of, exported
from outpace.integrations.vllm.interpreter import Interpreter
from outpace.integrations.vllm.speculative_config import Wanted, speculation
from outpace.model import Model
from outpace.targets.hf import HFTarget
from target_suite import tiny_model

NAMED = "models/tiny"
"""What the heads of these tests name as their model."""


class Owner:
    name = "tiny"
    target = target()


def owner() -> Model:
    return cast(Model, Owner())


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_of_another_model_is_warned_of(kind: str, tmp_path: Path) -> None:
    head = open_head(written(head_of(kind, 50), "speculators", tmp_path / "head"))
    [note] = exported(head, owner, "models/tiny-chat", "tiny-chat").notes
    assert "warning" in note
    assert "names 'models/tiny' as its model, and 'tiny-chat' is served" in note
    assert exported(head, owner, NAMED).notes == ()
    assert exported(head, owner, "/cache/converted", NAMED).notes == ()


def test_an_embedded_model_has_the_name_of_its_source_too(tmp_path: Path) -> None:
    folder = written(head_of("eagle3", 50), "speculators", tmp_path / "head")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = HUB["smollm2"]
    (folder / "config.json").write_text(json.dumps(config))
    assert exported(open_head(folder), owner, "/cache/converted", "smollm2").notes == ()


def test_the_warning_is_among_what_the_command_tells(tmp_path: Path) -> None:
    folder = written(head_of("eagle3", 50), "speculators", tmp_path / "head")
    wanted = Wanted(head=str(folder), model="tiny-chat")
    found = speculation(wanted, owner, "/cache/converted", Interpreter("python", "0.32.0"))
    assert found.config is not None
    assert found.config["model"] == str(folder)
    assert any("'tiny-chat' is served" in note for note in found.notes)


def test_a_kind_that_is_not_shipped_for_the_model_is_refused_by_the_name_that_the_user_gave() -> None:
    wanted = Wanted(head="eagle3", model="tiny-chat")
    with pytest.raises(BadInput, match=r"no head of this kind is shipped for 'tiny-chat'$"):
        speculation(wanted, owner, "/cache/converted", Interpreter("python", "0.32.0"))


def test_other_weights_at_the_same_place_have_an_export_of_their_own(tmp_path: Path) -> None:
    """The exported folder holds the embedding and LM head of the model that it was made for."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    before = _files_of(str(tmp_path))
    assert _files_of(str(tmp_path)) == before
    weights.write_bytes(b"other")
    assert _files_of(str(tmp_path)) != before
    assert _files_of("org/name") == ""


def test_a_head_whose_embedding_is_another_is_refused(tmp_path: Path) -> None:
    folder = written(head_of("eagle3", 50), "speculators", tmp_path / "head")

    class Other(Owner):
        target = HFTarget(tiny_model("llama", seed=8))

    with pytest.raises(BadInput, match="other weights"):
        exported(open_head(folder), lambda: cast(Model, Other()), NAMED)

"""benchmarks/training_speed.py: every setting trains on the same data, and graphs are counted."""

import json
from typing import Any

import pytest

import outpace
import training_speed
from cli_support import toy
from outpace.training.shards import Shards

TOY = toy()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder = tmp_path_factory.mktemp("speed")
    names = ["cat", "dog", "owl", "fox", "bee", "ant"]
    rows = [{"turns": [f"what did the {one} say to the {other}"]} for one in names for other in names if one != other]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings: dict[str, Any] = {
        "prompts": [folder / "prompts.jsonl"],
        "tokens": 300,
        "self_written": 0.0,
        "passages": 0.0,
    }
    outpace.train(TOY, "medusa", folder / "head", size="tiny", **settings)
    return Shards(folder / "head" / "data", {})


@pytest.mark.parametrize("name", training_speed.SETTINGS)
def test_every_setting_trains(shards: Shards, name: str) -> None:
    assert training_speed.speed(TOY, shards, training_speed.SETTINGS[name]) > 0.0


def test_states_are_left_out_where_they_are_computed_again(shards: Shards) -> None:
    with_states = [one for path in shards.paths for one in shards.read(path, (1, 2))]
    text = training_speed.TextAlone(shards)
    assert [one.tokens for path in text.paths for one in text.read(path, (1, 2))] == [one.tokens for one in with_states]
    assert all(one.states for one in with_states)
    assert not any(one.states for path in text.paths for one in text.read(path, (1, 2)))


@pytest.mark.slow
def test_graphs_are_counted(shards: Shards, capsys: pytest.CaptureFixture[str]) -> None:
    training_speed.graphs(TOY, shards, batches=1)
    said = capsys.readouterr().out
    assert said.startswith("batch 0: ") and "breaks: " in said
    assert int(said.split()[2]) > 1

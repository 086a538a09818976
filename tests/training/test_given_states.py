"""Hidden states that another engine wrote: read where they lie, and refused where they are of something else."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import outpace
from cli_support import toy
from outpace.core.errors import BadInput, MissingExtra
from outpace.heads.head_config import WEIGHTS
from outpace.targets.table import TableTarget
from outpace.training import given_states
from outpace.training.answers import states_of
from outpace.training.given_states import GivenStates, check_alike, opened
from outpace.training.shards import Conversation

TOY = toy()
LAYERS = (1, 2, 4)
"""Those that eagle3 reads of a target of four layers, and the last one's output."""


def texts(count: int = 40) -> list[tuple[list[int], list[bool]]]:
    found = []
    for number in range(count):
        size = 14 + number % 7
        tokens = [(5 * number + 3 * at + at * at) % 29 + 1 for at in range(size)]
        mask = [3 <= at < 6 or at >= 9 for at in range(size)]
        found.append((tokens, mask))
    return found


def states_for(tokens: list[int], layers: tuple[int, ...] = LAYERS) -> list[torch.Tensor]:
    found = states_of(TOY.target, [Conversation("", tokens, [])], layers)[0]
    return [found[layer] for layer in layers]


def as_pt(folder: Path, layers: tuple[int, ...] = LAYERS, count: int = 40) -> Path:
    folder.mkdir(exist_ok=True)
    for number, (tokens, mask) in enumerate(texts(count)):
        one = {"input_ids": torch.tensor(tokens), "loss_mask": torch.tensor(mask)}
        torch.save(one | {"hidden_states": states_for(tokens, layers)}, folder / f"data_{number}.pt")
    return folder


def as_safetensors(folder: Path, with_masks: bool = True) -> Path:
    (folder / "hidden_states").mkdir(parents=True)
    for number, (tokens, mask) in enumerate(texts()):
        one = {"token_ids": torch.tensor(tokens), "hidden_states": torch.stack(states_for(tokens), 1)}
        if with_masks:
            one["loss_mask"] = torch.tensor(mask)
        save_file(one, folder / "hidden_states" / f"hs_{number}.safetensors")
    return folder


@pytest.mark.parametrize("write", [as_pt, as_safetensors])
def test_both_layouts_hold_the_same_conversations(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    given = opened(write(tmp_path / "d"), LAYERS[:-1], TOY.target)
    found = [one for path in given.paths for one in given.read(path, LAYERS)]
    assert len({one.key for one in found}) == len(found) == 40
    for one, (tokens, mask) in zip(found, texts(), strict=True):
        assert one.tokens == tokens
        assert one.answers == [(3, 6), (9, len(tokens))]
        assert one.answer_tokens == sum(mask)
        for layer, rows in zip(LAYERS, states_for(tokens), strict=True):
            assert torch.equal(one.states[layer], rows)
    assert given.collected().tokens == given.answer_tokens() == sum(sum(mask) for _, mask in texts())


def test_masks_come_from_the_data_set_beside_the_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = as_safetensors(tmp_path / "d", with_masks=False) / "hidden_states"
    with pytest.raises(BadInput, match="has no loss_mask"):
        opened(folder, LAYERS[:-1], TOY.target)
    (tmp_path / "d" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"outpace\[train\]"):
        opened(folder, LAYERS[:-1], TOY.target)
    rows = [{"loss_mask": mask} for _, mask in texts()]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda _: rows))
    given = opened(folder, LAYERS[:-1], TOY.target)
    assert given.answer_tokens() == sum(sum(mask) for _, mask in texts())


def test_a_head_is_trained_on_them(tmp_path: Path) -> None:
    folder = as_pt(tmp_path / "states")
    made = outpace.train(TOY, "eagle3", tmp_path / "head", states=folder, size="tiny", options={"steps": 2})
    assert (tmp_path / "head" / WEIGHTS).exists()
    assert not (tmp_path / "head" / "data").exists()
    assert made.provenance["data"]["sources"] == {"states": 40}
    assert made.provenance["steps"] > 0
    assert "--states states" in made.provenance["command"]
    with pytest.raises(BadInput, match="give one of them"):
        outpace.train(TOY, "eagle3", tmp_path / "other", states=folder, data=tmp_path / "d")


def test_what_is_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no folder"):
        opened(tmp_path / "none", LAYERS[:-1], TOY.target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="holds no hidden states"):
        opened(tmp_path / "empty", LAYERS[:-1], TOY.target)
    with pytest.raises(BadInput, match="states of 2 layers, and the head reads 3"):
        opened(as_pt(tmp_path / "few", (1, 4), 3), LAYERS[:-1], TOY.target)
    with pytest.raises(BadInput, match="other states than this model's layer 1"):
        opened(as_pt(tmp_path / "others", (4, 2, 1), 3), LAYERS[:-1], TOY.target)
    folder = as_pt(tmp_path / "d", count=3)
    with pytest.raises(BadInput, match="other states than this model"):
        opened(folder, LAYERS[:-1], TableTarget(TOY.target.vocab_size, seed=77))
    with pytest.raises(BadInput, match="of another tokenizer"):
        list(GivenStates(folder, LAYERS, 4).read(folder / "data_0.pt"))


class Foreign:
    """What no file of tensors holds."""


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    one = {"input_ids": torch.arange(4), "loss_mask": torch.tensor([False, True, True, True])}
    torch.save({**one, "hidden_states": Foreign()}, tmp_path / "data_0.pt")
    with pytest.raises(BadInput, match="damaged or of another layout"):
        opened(tmp_path, LAYERS[:-1], TOY.target)
    (tmp_path / "data_0.pt").unlink()
    save_file({"token_ids": torch.arange(4), "hidden_states": torch.zeros(4)}, tmp_path / "hs_0.safetensors")
    with pytest.raises(BadInput, match="has no loss_mask"):
        opened(tmp_path, LAYERS[:-1], TOY.target)
    flat = {"token_ids": one["input_ids"], "loss_mask": one["loss_mask"].int(), "hidden_states": torch.zeros(4)}
    save_file(flat, tmp_path / "hs_0.safetensors")
    with pytest.raises(BadInput, match="damaged or of another layout"):
        opened(tmp_path, LAYERS[:-1], TOY.target)


def test_counting_reads_no_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = GivenStates(as_safetensors(tmp_path / "d"), LAYERS, TOY.target.vocab_size)
    kinds: set[str] = set()
    loaded = GivenStates._loaded

    def watched(self: GivenStates, file: Path, *, wanted: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        found = loaded(self, file, wanted=wanted)
        kinds.update(one.device.type for one in found[2])
        return found

    monkeypatch.setattr(GivenStates, "_loaded", watched)
    assert given.answer_tokens() == given.collected().tokens
    assert kinds == {"meta"}
    next(given.read(given.paths[0], LAYERS))
    assert kinds == {"meta", "cpu"}


@pytest.mark.parametrize(
    "idle", [{"tokens": 100}, {"turns": 3}, {"passages": 0.5}, {"cache_bytes": 1e6}, {"state_bits": 8}]
)
def test_options_of_what_is_not_collected_are_refused(tmp_path: Path, idle: dict[str, Any]) -> None:
    [name] = idle
    with pytest.raises(BadInput, match=f"--{name.replace('_', '-')} cannot be used with --states"):
        outpace.train(TOY, "eagle3", tmp_path / "head", states=as_pt(tmp_path / "d", count=1), **idle)


@pytest.mark.model
@pytest.mark.parametrize("layers", [(3, 15, 27, 30), (2, 16, 27, 30), (2, 15, 27, 29)])
def test_the_states_of_a_layers_neighbour_are_refused(layers: tuple[int, ...]) -> None:
    target, wanted = outpace.load("smollm2").target, (2, 15, 27, 30)
    tokens = [(7919 * at + 13) % target.vocab_size for at in range(40)]
    own = states_of(target, [Conversation("", tokens, [])], range(31))[0]
    check_alike("here", {layer: own[layer] for layer in wanted}, tokens, wanted, target)
    rough = {layer: own[layer] * (1.0 + 0.03 * torch.randn_like(own[layer])) for layer in wanted}
    check_alike("here", rough, tokens, wanted, target)  # engines round differently
    given = {layer: own[theirs] for layer, theirs in zip(wanted, layers, strict=True)}
    with pytest.raises(BadInput, match=r"holds (the|other) states"):
        check_alike("here", given, tokens, wanted, target)


@pytest.mark.parametrize("damage", ["short", "cut", "other"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    folder = as_pt(tmp_path / "d", count=3)
    file = folder / "data_1.pt"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:300])
    else:
        one = torch.load(file)
        torch.save({"x": 1} if damage == "other" else one | {"loss_mask": one["loss_mask"][:-1]}, file)
    with pytest.raises(BadInput, match=r"data_1\.pt.*delete it"):
        opened(folder, LAYERS[:-1], TOY.target).answer_tokens()


def test_what_speculators_writes_beside_the_states_is_no_conversation(tmp_path: Path) -> None:
    folder = as_pt(tmp_path / "d", count=3)
    torch.save(torch.ones(29), folder / "token_freq.pt")
    assert opened(folder, LAYERS[:-1], TOY.target).collected().prompts == 3


def test_states_of_another_width_are_named_wherever_they_are(tmp_path: Path) -> None:
    folder = as_pt(tmp_path / "d", count=3)
    one = torch.load(folder / "data_2.pt")
    torch.save(one | {"hidden_states": [rows[:, :-1] for rows in one["hidden_states"]]}, folder / "data_2.pt")
    given = opened(folder, LAYERS[:-1], TOY.target)
    with pytest.raises(BadInput, match=r"data_2\.pt has states .* wide, and others here"):
        [found for path in given.paths for found in given.read(path, LAYERS)]


def test_states_of_other_layers_in_a_later_part_of_the_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a second run of the other engine wrote them."""
    monkeypatch.setattr(given_states, "TOGETHER", 2)
    folder = as_pt(tmp_path / "d", count=6)
    tokens, _ = texts(6)[4]
    one = torch.load(folder / "data_4.pt")
    torch.save(one | {"hidden_states": states_for(tokens, LAYERS[1:] + LAYERS[:1])}, folder / "data_4.pt")
    with pytest.raises(BadInput, match=r"data_4 holds"):
        opened(folder, LAYERS[:-1], TOY.target)


def test_a_data_set_that_lacks_a_row_is_what_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = as_safetensors(tmp_path / "d", with_masks=False) / "hidden_states"
    (tmp_path / "d" / "dataset_info.json").write_text("{}")
    rows = [{"loss_mask": mask} for _, mask in texts()][:-1]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda _: rows))
    with pytest.raises(BadInput, match=r"row 39 of the data set"):
        opened(folder, LAYERS[:-1], TOY.target).answer_tokens()

    def damaged(_: str) -> None:
        raise ValueError("no Arrow file")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=damaged))
    with pytest.raises(BadInput, match="is no data set that can be read"):
        opened(folder, LAYERS[:-1], TOY.target)


def test_texts_without_answers_are_passed_over(tmp_path: Path) -> None:
    folder = as_pt(tmp_path / "d", count=2)
    one = torch.load(folder / "data_0.pt")
    torch.save(one | {"loss_mask": torch.zeros_like(one["loss_mask"])}, folder / "data_0.pt")
    given = opened(folder, LAYERS[:-1], TOY.target)
    assert [found.key for path in given.paths for found in given.read(path)] == ["data_1"]
    assert json.dumps(given.collected().public())

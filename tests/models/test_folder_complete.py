"""Every weight of a model in a folder comes from its files, or is named and refused; so it is of a draft model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import outpace.loading
from outpace.cli.session import Machine
from outpace.core.errors import BadInput
from test_models import tiny_model, tiny_tokenizer

Weights = dict[str, Tensor]
NAMES = sorted(name for name, _ in tiny_model().named_parameters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def change(folder: Path, weights: Callable[[Weights], Weights] = dict, config: Mapping[str, Any] | None = None) -> None:
    file = folder / "model.safetensors"
    save_file(weights(load_file(file)), file, {"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | dict(config or {})))


def refused(folder: Path, match: str) -> None:
    with pytest.raises(BadInput, match=match) as caught:
        outpace.loading.load(folder, dtype="float32")
    assert "\n" not in str(caught.value)
    assert "..." not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_weight(folder: Path, name: str) -> None:
    change(folder, lambda found: {one: weight for one, weight in found.items() if one != name})
    refused(folder, rf"the weights in '.*' lack {name}")
    with pytest.raises(BadInput, match=rf"lack {name}"):
        Machine(dtype="float32").load(str(folder))  # as the command line loads targets and draft models


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_another_shape(folder: Path, name: str) -> None:
    change(folder, lambda found: found | {name: found[name][:-1].clone()})
    refused(folder, rf"have {name} in shape \(\d+.*\), and the model is described with")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES[:3])
def test_a_value_that_is_not_finite(folder: Path, name: str, value: float) -> None:
    def endless(found: Weights) -> Weights:
        found[name].view(-1)[-1] = value
        return found

    change(folder, endless)
    refused(folder, f"have values that are not finite in {name}")


@pytest.mark.parametrize("layers", [0, -2, 10**12])
def test_layers_that_cannot_be(folder: Path, layers: int) -> None:
    change(folder, config={"num_hidden_layers": layers})
    refused(folder, rf"config\.json says num_hidden_layers = {layers}, and the weights beside it are \d+ tensors")


def test_one_layer_more(folder: Path) -> None:
    layers = tiny_model().config.num_hidden_layers
    change(folder, config={"num_hidden_layers": layers + 1})
    refused(folder, rf"lack model\.layers\.{layers}\..* and \d+ more")


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size", "head_dim"])
def test_sizes_far_beyond_the_files_are_not_allocated(folder: Path, key: str) -> None:
    change(folder, config={key: 2**40})
    refused(folder, r"described as a model of [\d,]+ weights, and holds [\d,]+")


def test_tied_weights_may_be_missing(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert outpace.loading.load(tmp_path, dtype="float32").target.num_layers == model.config.num_hidden_layers

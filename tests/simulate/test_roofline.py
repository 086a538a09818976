"""The roofline against sums that are written out by hand; shapes against the sizes that models are published with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outpace.controllers.predictor import Predictor
from outpace.core.errors import BadInput
from outpace.simulate.hardware import PRESETS, Hardware, find_hardware
from outpace.simulate.model_shape import SHAPES, ModelShape, find_shape
from outpace.simulate.roofline import Parallel, Roofline, RooflineCosts, Work

DEVICE = Hardware("d", "gpu", 1e6, 2e6, 1e3, 1e9, 500.0, 10.0, "here", link_seconds=0.5)
SHAPE = ModelShape("s", layers=3, hidden=4, heads=2, kv_heads=1, head_size=2, intermediate=8, vocabulary=16)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.54),
        ("qwen2.5-7b", 7.61),
        ("llama-2-7b", 6.74),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("llama-3.1-405b", 405.9),
        ("mixtral-8x7b", 46.7),
        ("qwen2-57b-a14b", 57.4),
        ("qwen3-30b-a3b", 30.5),
    ],
)
def test_shapes_have_as_many_parameters_as_their_models(name: str, billions: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_one_row_is_read_from_memory() -> None:
    """At one row this device is bound by its bandwidth: every weight and every K/V once."""
    layer = 4 * (2 * 2 * 2 + 2 * 1 * 2) + 3 * 4 * 8
    kv = 10 * 2 * 1 * 2 * 2  # tokens, K and V, heads, width, bytes
    by_hand = 3 * (2 * layer + kv) / 1e3 + 2 * 4 * 16 / 1e3
    assert Roofline(SHAPE, DEVICE).forward(Work.of_round([1], [10])) == pytest.approx(by_hand)


def test_many_rows_are_bound_by_the_peak() -> None:
    slow = replace(DEVICE, peak=10.0)
    layer = 4 * (2 * 2 * 2 + 2 * 1 * 2) + 3 * 4 * 8
    pairs = 64 * 65 / 2
    by_hand = (3 * (2 * 64 * layer + 4 * pairs * 2 * 2) + 2 * 64 * 4 * 16) / 10.0
    assert Roofline(SHAPE, slow).forward(Work.of_round([64], [0])) == pytest.approx(by_hand)
    without_head = (3 * (2 * 64 * layer + 4 * pairs * 2 * 2)) / 10.0
    assert Roofline(SHAPE, slow).forward(Work.of_chunk([64], [0])) == pytest.approx(without_head)


def test_weights_of_fewer_bits_are_read_faster_and_multiplied_in_16() -> None:
    read = [Roofline(SHAPE, DEVICE, bits=bits).forward(Work(1, 0, 0, 0)) for bits in (16, 8, 4)]
    assert read == pytest.approx([read[0], read[0] / 2, read[0] / 4])
    slow = replace(DEVICE, peak=10.0, peak8=40.0)
    multiplied = [Roofline(SHAPE, slow, bits=bits).forward(Work(512, 0, 0, 0)) for bits in (16, 8, 4)]
    assert multiplied == pytest.approx([multiplied[0], multiplied[0] / 4, multiplied[0]])


def test_tensor_parallelism_divides_the_work_and_adds_all_reduces() -> None:
    shape = replace(SHAPE, kv_heads=2)
    alone = Roofline(shape, DEVICE).forward(Work(1, 10, 10, 0))
    two = Roofline(shape, DEVICE, parallel=Parallel(tensor=2)).forward(Work(1, 10, 10, 0))
    all_reduce = 2 * (1 / 2) * 4 * 2 / 500.0 + 0.5
    assert two == pytest.approx(alone / 2 + 3 * 2 * all_reduce)


def test_a_device_holds_and_reads_a_whole_kv_head_at_least() -> None:
    assert SHAPE.kv_heads == 1
    one, two = Roofline(SHAPE, DEVICE), Roofline(SHAPE, DEVICE, parallel=Parallel(tensor=2))
    assert (one.kv_copies, two.kv_copies) == (1, 2)
    assert two.kv_bytes_per_token == 2 * one.kv_bytes_per_token
    longer = [roofline.forward(Work(1, 1000, 0, 0)) - roofline.forward(Work(1, 500, 0, 0)) for roofline in (one, two)]
    assert longer[0] == pytest.approx(longer[1])


def test_pipeline_stages_are_the_layers_and_what_is_sent() -> None:
    whole = Roofline(SHAPE, DEVICE)
    parts = Roofline(SHAPE, DEVICE, parallel=Parallel(pipeline=2))
    work = Work.of_round([1], [10])
    sent = 4 * 2 / 500.0 + 0.5
    stages = parts.stages(work)
    assert len(stages) == 2
    assert sum(stages) == pytest.approx(whole.forward(work) + sent)
    layers = whole.forward(work._replace(logits=0)) / 3
    assert stages[0] == pytest.approx(2 * layers + sent)


def test_experts_that_rows_use() -> None:
    shape = replace(SHAPE, experts=8, active_experts=2)
    assert shape.touched_experts(1) == pytest.approx(2)
    assert shape.touched_experts(4) == pytest.approx(8 * (1 - (3 / 4) ** 4))
    assert shape.touched_experts(1000) == pytest.approx(8)
    assert SHAPE.touched_experts(1) == 1


def test_the_predictor_reads_a_roofline() -> None:
    costs = RooflineCosts(Roofline(SHAPES["llama-3.1-8b"], PRESETS["h100"]))
    predictor = Predictor(costs)
    alone, crowded = predictor.verification(4, 1, 1000), predictor.verification(4, 512, 1000)
    assert 1.0 <= alone < 1.05  # bound by the weights
    assert crowded > 2.0  # bound by the peak
    rounds = [costs.round(8, count, 500) for count in range(9)]
    assert rounds == sorted(rounds)


def test_unknown_hardware_is_refused_with_the_presets() -> None:
    for name in ("h1000", "quantum"):
        with pytest.raises(BadInput, match="unknown hardware") as error:
            find_hardware(name)
        assert all(preset in str(error.value) for preset in PRESETS)
    assert find_hardware("H100") is PRESETS["h100"]


def test_presets_state_a_source() -> None:
    for one in PRESETS.values():
        assert one.source.startswith("https://")
        assert min(one.peak, one.peak8, one.bandwidth, one.memory, one.link) > 0


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadInput, match=r"takes 141 GB; 1 x h100 have 72 GB.*--tensor-parallel"):
        _ = Roofline(SHAPES["llama-3.1-70b"], PRESETS["h100"]).kv_capacity
    assert Roofline(SHAPES["llama-3.1-70b"], PRESETS["h100"], parallel=Parallel(4)).kv_capacity > 0
    with pytest.raises(BadInput, match="does not divide the 32 heads"):
        Roofline(SHAPES["llama-3.1-8b"], PRESETS["h100"], parallel=Parallel(3))
    with pytest.raises(BadInput, match="16, 8 or 4 bits"):
        Roofline(SHAPE, DEVICE, bits=5)
    with pytest.raises(BadInput, match="has 3 layers"):
        Roofline(SHAPE, DEVICE, parallel=Parallel(1, 4))


def test_weights_of_32_bits_are_read_and_multiplied_in_twice_the_time() -> None:
    half, whole = (Roofline(SHAPE, DEVICE, bits) for bits in (16, 32))
    assert whole.weight_bytes == 2 * half.weight_bytes
    one = Work(1, 0, 0.0, 1)
    assert whole.forward(one) == pytest.approx(2 * half.forward(one))


def test_a_shape_is_read_from_a_configuration(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 16, "vocab_size": 10}))
    found = find_shape(str(tmp_path))
    assert (found.layers, found.kv_heads, found.head_size, found.experts) == (2, 2, 2, 1)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(BadInput, match="'intermediate_size' is None"):
        find_shape(str(tmp_path))
    deepseek = {**sizes, "intermediate_size": 16, "vocab_size": 10, "n_routed_experts": 256, "kv_lora_rank": 512}
    for more, said in ((deepseek, "latent attention"), ({**deepseek, "kv_lora_rank": None}, "routed experts")):
        (tmp_path / "config.json").write_text(json.dumps(more))
        with pytest.raises(BadInput, match=f"of a model with {said}"):
            find_shape(str(tmp_path))
    with pytest.raises(BadInput, match=r"unknown model shape 'llama-9'.*config\.json"):
        find_shape("llama-9")

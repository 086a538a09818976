"""Weights in blocks: every kind of GGUF file against the gguf package, and the kernels' products against float64."""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, strategies as st

from dense_support import config, mixed, model_of, threads, write_blocks
from outpace.targets.dense import quant_blocks
from outpace.targets.dense.binding import ForwardRecord, NativeModel, Packed, Shape
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.quant_blocks import Blocks
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf_support import disagreement

SCALES = {"Q4_0": 0, "Q4_1": 0, "Q5_0": 0, "Q5_1": 0, "Q8_0": 0, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208}
"""Where a block's first scale lies."""
MINIMA = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}


def random_blocks(kind: str, outputs: int, inputs: int, seed: int) -> tuple[Any, Any]:
    """Rows as they lie in a file, and what they stand for by the gguf package."""
    rng = np.random.default_rng(seed)
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (outputs, inputs // size, width), dtype=np.uint8)
    for at in range(SCALES[kind], SCALES[kind] + (4 if kind in MINIMA else 2), 2):
        halves = rng.normal(0, 0.02, (outputs, inputs // size)).astype("<f2")
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    raw = raw.reshape(outputs, -1)
    return raw, dequantize(raw, gguf.GGMLQuantizationType[kind])


def native(packed: Packed) -> NativeModel:
    """A model without layers, whose embedding and head are one matrix, and whose norm divides by the size alone."""
    model = NativeModel(Shape(0, packed.inputs, 1, 1, 16, 16, packed.outputs, 1, 0, 0.0, 1.0, 0.0, 1.0))
    model.set_norm(-1, 0, np.ones(packed.inputs, np.float32))
    model.set_matrix(-1, 0, packed)
    model.set_matrix(-1, 1, None)
    return model


def unpacked(packed: Packed) -> Any:
    rows = torch.empty(packed.outputs, packed.inputs)
    native(packed).embed(torch.arange(packed.outputs, dtype=torch.int32), rows)
    return rows.numpy()


def product(packed: Packed, inputs: Any) -> Any:
    """The head's product with rows whose mean square is 1, which the norm leaves as they are."""
    width = -(-packed.outputs // 16) * 16
    out = torch.full((len(inputs), width), float("nan"))
    inputs = np.ascontiguousarray(inputs, dtype=np.float32)
    record = ForwardRecord(rows=len(inputs), states=inputs.ctypes.data, logits=out.data_ptr(), logit_stride=width)
    tokens = np.zeros(len(inputs), np.int32)
    record.tokens = ctypes.c_void_p(tokens.ctypes.data)
    with threads(2):
        native(packed).run(record)
    return out[:, : packed.outputs].numpy()


def of_size_one(rows: Any) -> Any:
    return rows / np.sqrt(np.square(rows).mean(-1, keepdims=True))


def packed_in(kind: str, seed: int = 0) -> Packed:
    """A matrix of 37 x 512 in a GGUF kind or one of our own formats."""
    weights = np.random.default_rng(seed).normal(0, 0.1, (37, 500)).astype(np.float32)
    if kind in ("F32", "BF16"):
        return Packed(kind, 37, 500, rows=weights)
    if kind == "int8":
        return quant_blocks.to_int8(torch.from_numpy(weights))
    return quant_blocks.from_gguf(kind, random_blocks(kind, 37, 512, seed)[0])


def kept(packed: Packed) -> Any:
    """The weights that a packed matrix holds."""
    if packed.format == "F32":
        return packed.rows
    if packed.format == "BF16":
        assert packed.rows is not None
        return torch.from_numpy(packed.rows).bfloat16().float().numpy()
    return quant_blocks.values(packed)


def test_all_kinds_are_tested() -> None:
    assert set(SCALES) == quant_blocks.KINDS


@pytest.mark.parametrize("kind", SCALES)
def test_blocks_stand_for_what_gguf_says(kind: str) -> None:
    raw, expected = random_blocks(kind, 7, 512, 1)
    packed = quant_blocks.from_gguf(kind, raw)
    assert (packed.outputs, packed.inputs) == expected.shape
    np.testing.assert_array_max_ulp(quant_blocks.values(packed), expected, maxulp=1)


@pytest.mark.parametrize("kind", ["F32", "BF16", "int8", *SCALES])
def test_packing_keeps_every_weight(kind: str) -> None:
    packed = packed_in(kind)
    np.testing.assert_array_equal(unpacked(packed), kept(packed))


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 13])
@pytest.mark.parametrize("kind", ["F32", "BF16", "int8", *SCALES])
def test_products_are_exact_where_the_inputs_need_no_rounding(kind: str, rows: int) -> None:
    packed = packed_in(kind, rows)
    weights = kept(packed).astype(np.float64)
    rng = np.random.default_rng(rows)
    whole = rng.integers(-127, 128, (rows, packed.inputs)).astype(np.float64)
    whole[:, ::16] = 127  # so that every block is divided by its own size, to whole numbers
    if kind == "BF16":
        whole = np.where(whole > 0, 1.0, -1.0)  # which stay exact whatever they are divided by
    inputs = of_size_one(whole)
    found = product(packed, inputs)
    expected = inputs @ weights.T
    np.testing.assert_allclose(found, expected, atol=3e-6 * (np.abs(inputs) @ np.abs(weights.T)).max(), rtol=0)


@pytest.mark.parametrize("kind", ["int8", *SCALES])
def test_products_are_within_the_rounding_of_the_inputs(kind: str) -> None:
    packed = packed_in(kind)
    weights = kept(packed).astype(np.float64)
    inputs = of_size_one(np.random.default_rng(3).standard_t(3, (5, packed.inputs)))
    padding = -packed.inputs % 32
    in_blocks = np.pad(inputs, ((0, 0), (0, padding))).reshape(5, -1, 32)
    half_step = np.abs(in_blocks).max(-1) / 127 / 2
    sums = np.pad(np.abs(weights), ((0, 0), (0, padding))).reshape(37, -1, 32).sum(-1)
    bound = half_step @ sums.T
    difference = np.abs(product(packed, inputs) - inputs @ weights.T)
    assert (difference <= 1.001 * bound + 1e-5).all()
    assert difference.max() > 0.01 * bound.max(), "they are rounded"


@given(
    seed=st.integers(0, 10**6),
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 100),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_rounding_to_8_bits_is_bounded(seed: int, outputs: int, inputs: int, size: float) -> None:
    weight = torch.from_numpy(np.random.default_rng(seed).standard_t(2, (outputs, inputs))).float() * size
    packed = quant_blocks.to_int8(weight)
    found = torch.from_numpy(quant_blocks.values(packed))
    assert found.shape == weight.shape
    peaks = torch.nn.functional.pad(weight.abs(), (0, -inputs % 32)).view(outputs, -1, 32).amax(-1)
    # Half a step, and 127 times the rounding of the scale: half a unit of fp16, which ends at 2^-24.
    bound = peaks * (1 / 254 + 2**-11) + 127 * 2**-25
    assert ((found - weight).abs() <= bound.repeat_interleave(32, 1)[:, :inputs] * 1.001).all()


def test_weights_of_zero_and_too_small_for_a_scale_become_zero() -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 1e-9
    assert not quant_blocks.values(quant_blocks.to_int8(weight)).any()


def blocks_in(kind: str, seed: int) -> Blocks:
    return Blocks(kind, random_blocks(kind, 37, 512, seed)[0])


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K"), ("Q5_0", "Q5_1"), ("Q8_0", "Q8_0")])
@pytest.mark.parametrize("made", [packed_in, blocks_in])
def test_stacked_and_chosen_rows_keep_blocks_and_biases(
    made: Callable[[str, int], Any], kinds: tuple[str, str]
) -> None:
    one, other = made(kinds[0], 1), made(kinds[1], 2)
    one.bias = np.arange(37, dtype=np.float32)
    both = quant_blocks.stack([one, other])
    expected = np.concatenate([quant_blocks.values(one), quant_blocks.values(other)])
    np.testing.assert_array_equal(quant_blocks.values(both), expected)
    order = np.array([40, -1, 3])
    some = quant_blocks.taken(both, order)
    np.testing.assert_array_equal(quant_blocks.values(some), [expected[40], np.zeros(512), expected[3]])
    assert some.bias is not None and some.bias.tolist() == [0, 0, 3]
    one.bias = None
    both, without = (quant_blocks.unpacked(each) for each in (both, quant_blocks.stack([one, other])))
    with_bias = product(both, np.ones((1, 512))) - product(without, np.ones((1, 512)))
    np.testing.assert_allclose(with_bias[0], [*range(37), *([0] * 37)], atol=1e-4)


# --- whole files


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
    return model_of(config(**{**sizes, "initializer_range": 0.1, **changes}))


@pytest.mark.parametrize("head_size", [8, 24, 32, 64])
def test_a_file_is_kept_block_for_block_in_the_models_order_of_rows(tmp_path: Path, head_size: int) -> None:
    model = llama(head_dim=head_size, num_attention_heads=4, tie_word_embeddings=False)
    path = write_blocks(tmp_path / "tiny.gguf", model, mixed)
    target = DenseTarget(read_decoder_spec(model), "int4", gguf=path)
    assert set(target.formats) == {"Q4", "Q4M", "Q8", "Q8W"}
    assert disagreement(target, model) < 0.05  # the rounding of inputs


def test_what_is_not_in_blocks_or_not_the_models_stays_in_bfloat16(tmp_path: Path) -> None:
    model = llama()
    path = write_blocks(tmp_path / "tiny.gguf", model, lambda name: "F16" if "ffn_gate" in name else mixed(name))
    with torch.no_grad():  # a matrix that the file has otherwise
        model.model.layers[1].self_attn.o_proj.weight.mul_(1.5)
    target = DenseTarget(read_decoder_spec(model), "int4", gguf=path)
    layer = 256 * 256
    # Gates and what they multiply are kept in one format: the file's blocks of one cannot stand beside the other.
    assert target.formats["BF16"] >= 2 * layer + model.model.layers[1].self_attn.o_proj.weight.numel()
    assert disagreement(target, model) < 0.05


def test_a_whole_file_in_floating_point(tmp_path: Path) -> None:
    model = llama()
    path = write_blocks(tmp_path / "tiny.gguf", model, lambda name: "F32" if "norm" in name else "F16")
    target = DenseTarget(read_decoder_spec(copy.deepcopy(model)), "int4", gguf=path)
    assert set(target.formats) == {"BF16"}
    assert disagreement(target, model) < 0.05


def test_a_file_of_another_architecture_than_the_model_gives_no_blocks(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "tiny.gguf", llama(), mixed)
    other = llama(hidden_size=128, intermediate_size=96)
    target = DenseTarget(read_decoder_spec(other), "int4", gguf=path)
    assert set(target.formats) == {"BF16"} and disagreement(target, other) < 0.05


def test_random_models_keep_their_scores_in_int8() -> None:
    for seed in range(3):
        model = model_of(config(hidden_size=random.Random(seed).randrange(8, 22) * 4), seed)
        assert disagreement(DenseTarget(read_decoder_spec(model), "int8"), model) < 0.2

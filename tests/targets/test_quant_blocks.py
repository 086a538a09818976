"""Weights in blocks: every kind of GGUF file against the gguf package, and the kernels' products against float64."""

from __future__ import annotations

import copy
import ctypes
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, strategies as st

from dense_support import MINIMA, SCALES, config, mixed, model_of, random_blocks, threads, write_blocks
from outpace.core.errors import BadInput, OutpaceError
from outpace.targets.dense import quant_blocks
from outpace.targets.dense.binding import ForwardRecord, Packed, Shape, features
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.native_model import NativeModel
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf_support import disagreement


def blocks_of(kind: str, outputs: int, inputs: int, seed: int) -> tuple[Any, Any]:
    """Rows as they lie in a file, and what they stand for by the gguf package."""
    raw = random_blocks(kind, outputs, inputs, seed)
    return raw, dequantize(raw, gguf.GGMLQuantizationType[kind])


def native(packed: Packed, *, norm: bool = True) -> NativeModel:
    """A model without layers, whose embedding and head are one matrix, and whose norm divides by the size alone."""
    model = NativeModel(Shape(0, packed.inputs, 1, 1, 16, 16, packed.outputs, 1, 0, 0.0, 1.0, 0.0, 1.0))
    model.set_norm(-1, 0, np.ones(packed.inputs if norm else 0, np.float32))
    model.set_matrix(-1, 0, packed)
    model.set_matrix(-1, 1, None)
    return model


def unpacked(packed: Packed) -> Any:
    rows = torch.empty(packed.outputs, packed.inputs)
    native(packed).embed(torch.arange(packed.outputs, dtype=torch.int32), rows)
    return rows.numpy()


def product(packed: Packed, inputs: Any, *, norm: bool = True) -> Any:
    """The head's product with rows whose mean square is 1, which the norm leaves as they are, or nearly."""
    width = -(-packed.outputs // 16) * 16
    out = torch.full((len(inputs), width), float("nan"))
    inputs = np.ascontiguousarray(inputs, dtype=np.float32)
    record = ForwardRecord(rows=len(inputs), states=inputs.ctypes.data, logits=out.data_ptr(), logit_stride=width)
    tokens = np.zeros(len(inputs), np.int32)
    record.tokens = ctypes.c_void_p(tokens.ctypes.data)
    with threads(2):
        native(packed, norm=norm).run(record)
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
    return quant_blocks.from_gguf(kind, random_blocks(kind, 37, 512, seed))


def kept(packed: Packed) -> Any:
    """The weights that a packed matrix holds."""
    if packed.format == "F32":
        return packed.rows
    if packed.format == "BF16":
        assert packed.rows is not None
        return torch.from_numpy(packed.rows).bfloat16().float().numpy()
    return unpacked(packed)


def test_all_kinds_are_tested() -> None:
    assert set(SCALES) == quant_blocks.KINDS


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("outputs", [7, 16, 33])
def test_blocks_stand_for_what_gguf_says(kind: str, outputs: int) -> None:
    raw, expected = blocks_of(kind, outputs, 512, 1)
    packed = quant_blocks.from_gguf(kind, raw)
    assert (packed.outputs, packed.inputs) == expected.shape
    np.testing.assert_array_equal(unpacked(packed), expected)


@pytest.mark.parametrize("kind", SCALES)
def test_scales_that_are_too_small_for_a_normal_half_are_kept(kind: str) -> None:
    raw, _ = blocks_of(kind, 16, 256, 1)
    _, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw.reshape(16, -1, width)[..., SCALES[kind] : SCALES[kind] + 2] = np.array(3, "<u2").reshape(1).view(np.uint8)
    expected = dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert expected.any()
    np.testing.assert_array_equal(unpacked(quant_blocks.from_gguf(kind, raw)), expected)


@pytest.mark.parametrize("kind", SCALES)
def test_packing_on_several_threads_is_packing_on_one(kind: str) -> None:
    raw, expected = blocks_of(kind, 900, 256, 4)
    with threads(3):
        np.testing.assert_array_equal(unpacked(quant_blocks.from_gguf(kind, raw)), expected)


INFINITE = (0x7C00, 0xFE01)
"""Bits of an fp16 infinity and of an fp16 NaN."""


def _damaged() -> list[Any]:
    places = [(kind, at) for kind, at in SCALES.items()] + [(kind, SCALES[kind] + 2) for kind in sorted(MINIMA)]
    return [
        pytest.param(kind, at, bits, id=f"{kind}-{at}-{bits:x}") for kind, at in places for bits in (0x7C00, 0xFE01)
    ]


@pytest.mark.parametrize(("kind", "at", "bits"), _damaged())
def test_a_scale_that_is_not_finite_is_refused(kind: str, at: int, bits: int) -> None:
    raw, _ = blocks_of(kind, 37, 512, 1)
    width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw[36, raw.shape[1] - width + at :][:2] = np.array([bits], "<u2").view(np.uint8)
    with pytest.raises(BadInput, match="not finite"):
        native(quant_blocks.from_gguf(kind, raw))


def test_super_blocks_that_are_cut_are_refused() -> None:
    packed = quant_blocks.from_gguf("Q4_K", blocks_of("Q4_K", 16, 512, 1)[0])
    packed.inputs = 480
    with pytest.raises(OutpaceError, match="whole blocks"):
        native(packed)


def test_floating_point_weights_are_kept() -> None:
    for kind in ("F32", "BF16"):
        packed = packed_in(kind)
        assert packed.rows is not None
        kept = torch.from_numpy(packed.rows)
        expected = kept if kind == "F32" else kept.bfloat16().float()
        np.testing.assert_array_equal(unpacked(packed), expected.numpy())


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
    found = torch.from_numpy(unpacked(packed))
    assert found.shape == weight.shape
    peaks = torch.nn.functional.pad(weight.abs(), (0, -inputs % 32)).view(outputs, -1, 32).amax(-1)
    # Half a step, and 127 times the rounding of the scale: half a unit of fp16, which ends at 2^-24.
    bound = peaks * (1 / 254 + 2**-11) + 127 * 2**-25
    assert ((found - weight).abs() <= bound.repeat_interleave(32, 1)[:, :inputs] * 1.001).all()


def test_weights_of_zero_and_too_small_for_a_scale_become_zero() -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 1e-9
    assert not unpacked(quant_blocks.to_int8(weight)).any()


@pytest.mark.parametrize("kind", ["F32", "int8", "Q4_K", "Q6_K", "Q8_0"])
def test_stacked_and_chosen_rows_keep_weights_and_biases(kind: str) -> None:
    one, other = packed_in(kind, 1), packed_in(kind, 2)
    one.bias = np.arange(37, dtype=np.float32)
    both = quant_blocks.stack([one, other])
    expected = np.concatenate([unpacked(one), unpacked(other)])
    np.testing.assert_array_equal(unpacked(both), expected)
    order = np.array([40, -1, 3])
    some = quant_blocks.taken(both, order)
    np.testing.assert_array_equal(unpacked(some), [expected[40], np.zeros(one.inputs), expected[3]])
    assert some.bias is not None and some.bias.tolist() == [0, 0, 3]
    one.bias = None
    without = quant_blocks.stack([one, other])
    row = np.ones((1, one.inputs))
    np.testing.assert_allclose((product(both, row) - product(without, row))[0], [*range(37), *([0] * 37)], atol=1e-4)


def test_the_rows_of_a_file_are_taken_in_the_order_that_is_asked_for() -> None:
    raw, expected = blocks_of("Q6_K", 32, 256, 1)
    order = quant_blocks.halves_apart(32, 16)
    assert sorted(order) == list(range(32)) and order[:3].tolist() == [0, 2, 4]
    np.testing.assert_array_equal(unpacked(quant_blocks.from_gguf("Q6_K", raw, order)), expected[order])
    np.testing.assert_array_equal(unpacked(quant_blocks.from_gguf("Q6_K", raw[::-2])), expected[::-2])


def rounded(exact: Fraction) -> Fraction:
    """To the nearest float32, ties to even."""
    near = np.float32(float(exact))
    around = [near, np.nextafter(near, np.float32("inf")), np.nextafter(near, np.float32("-inf"))]
    return Fraction(float(min(around, key=lambda one: (abs(Fraction(float(one)) - exact), one.view(np.uint32) & 1))))


def blocks_times_row(weights: Any, scales: Any, minima: Any, zero: int, size: int, row: Any) -> float:
    """One output's product, rounded where and when the kernels round it. ``scales``: one for each ``size`` inputs."""
    total = Fraction(0)
    for at in range(0, len(row), 32):
        part = row[at : at + 32]
        peak = np.abs(part).max()
        step, inverse = np.float32(peak / np.float32(127)), np.float32(np.float32(127) / peak)
        q = np.rint(part * inverse).astype(int)
        for begin in range(at, at + 32, size):
            whole = int(((weights[begin : begin + size] - zero) * q[begin - at : begin - at + size]).sum())
            scale = np.float32(scales[begin // size]) * step
            total = rounded(whole * Fraction(float(scale)) + total)
        if minima is not None:
            scaled_sum = np.float32(step * np.float32(q.sum()))
            total = rounded(Fraction(float(minima[at // 32])) * Fraction(float(scaled_sum)) + total)
    return float(total)


def apart(kind: str, raw: Any) -> tuple[Any, Any, Any, int]:
    """Unsigned numbers, scales, minima and zero of Q4_K and Q6_K rows of a single super-block, by the format's text."""

    def half(at: int) -> Any:
        return raw[:, at : at + 2].copy().view("<f2").astype(np.float32)

    if kind == "Q6_K":
        low, high = raw[:, :128].reshape(-1, 2, 2, 32), raw[:, 128:192].reshape(-1, 2, 32)
        q = np.stack([low[:, :, 0] & 15, low[:, :, 1] & 15, low[:, :, 0] >> 4, low[:, :, 1] >> 4], axis=2).astype(int)
        q |= np.stack([(high >> shift & 3).astype(int) << 4 for shift in (0, 2, 4, 6)], axis=2)
        return q.reshape(-1, 256), half(208) * raw[:, 192:208].view(np.int8).astype(np.float32), None, 32
    six = raw[:, 4:16].astype(int)
    scales = np.concatenate([six[:, :4] & 63, six[:, 8:] & 15 | (six[:, :4] >> 6) << 4], axis=1)
    minima = np.concatenate([six[:, 4:8] & 63, six[:, 8:] >> 4 | (six[:, 4:8] >> 6) << 4], axis=1)
    payload = raw[:, 16:].reshape(-1, 4, 1, 32).astype(int)
    q = np.concatenate([payload & 15, payload >> 4], axis=2).reshape(-1, 256)
    return q, half(0) * scales.astype(np.float32), -half(2) * minima.astype(np.float32), 0


@pytest.mark.skipif(not features(), reason="products and sums are rounded one by one")
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_products_of_super_blocks_round_as_those_of_float_scales(kind: str) -> None:
    raw, _ = blocks_of(kind, 19, 256, 5)
    q, scales, minima, zero = apart(kind, raw)
    rows = np.random.default_rng(3).normal(size=(3, 256)).astype(np.float32)
    found = product(quant_blocks.from_gguf(kind, raw), rows, norm=False)
    for number, row in enumerate(rows):
        for output in range(19):
            least = None if minima is None else minima[output]
            expected = blocks_times_row(q[output], scales[output], least, zero, 16 if kind == "Q6_K" else 32, row)
            assert found[number, output] == expected


# --- whole files


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
    return model_of(config(**{**sizes, "initializer_range": 0.1, **changes}))


@pytest.mark.parametrize("head_size", [8, 24, 32, 64])
def test_a_file_is_kept_block_for_block_in_the_models_order_of_rows(tmp_path: Path, head_size: int) -> None:
    model = llama(head_dim=head_size, num_attention_heads=4, tie_word_embeddings=False)
    path = write_blocks(tmp_path / "tiny.gguf", model, mixed)
    target = DenseTarget(read_decoder_spec(model), "int4", gguf=path)
    assert set(target.formats) == {"Q4", "Q4M", "Q5", "Q8"}
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

"""Quantised weights in blocks of whole numbers: those of GGUF files, and our own rounding to 8 bits.

Every kind becomes ``w = scale * q + minimum`` (or ``scale * (q - zero)``) with q unsigned, one scale for each block of
16 or 32 inputs. That is an exact rewriting of the file's blocks, not another quantisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.targets.dense.binding import BLOCK, Bytes, Floats, Packed

Raw = npt.NDArray[np.uint8]
"""A tensor's rows as they lie in the file: (outputs, bytes)."""
Rows = npt.NDArray[np.int64]
"""Numbers of rows."""


def _halves(raw: Raw) -> Floats:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Raw) -> Bytes:
    """(..., n) bytes -> (..., 2n): all low halves, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _blocks(raw: Raw, size: int) -> Raw:
    return raw.reshape(raw.shape[0], -1, size)


def _q4_0(raw: Raw) -> tuple[str, Bytes, Floats, Floats | None]:
    block = _blocks(raw, 18)
    return "Q4", _nibbles(block[..., 2:]), _halves(block[..., :2])[..., 0], None


def _q4_1(raw: Raw) -> tuple[str, Bytes, Floats, Floats | None]:
    block = _blocks(raw, 20)
    ends = _halves(block[..., :4])
    return "Q4M", _nibbles(block[..., 4:]), ends[..., 0], ends[..., 1]


def _fifth_bits(raw: Raw) -> Bytes:
    """(..., 4) bytes of 32 single bits -> (..., 32) of 0 or 16."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little") * np.uint8(16)


def _q5_0(raw: Raw) -> tuple[str, Bytes, Floats, Floats | None]:
    block = _blocks(raw, 22)
    scale = _halves(block[..., :2])[..., 0]
    return "Q8W", _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6]), scale, -16 * scale


def _q5_1(raw: Raw) -> tuple[str, Bytes, Floats, Floats | None]:
    block = _blocks(raw, 24)
    ends = _halves(block[..., :4])
    return "Q8W", _nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8]), ends[..., 0], ends[..., 1]


def _q8_0(raw: Raw) -> tuple[str, Bytes, Floats, Floats | None]:
    block = _blocks(raw, 34)
    return "Q8", block[..., 2:] ^ np.uint8(0x80), _halves(block[..., :2])[..., 0], None


def _k_scales(raw: Raw) -> tuple[Bytes, Bytes]:
    """(..., 12) bytes -> eight 6-bit scales and eight 6-bit minima."""
    low, mid, high = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], axis=-1)
    return scales, minima


def _k(raw: Raw, size: int) -> tuple[Raw, Floats, Floats]:
    """The super-blocks of Q4_K and Q5_K, with the scale and minimum of each of their eight blocks."""
    block = _blocks(raw, size)
    ends = _halves(block[..., :4])
    scales, minima = _k_scales(block[..., 4:16])
    return block, ends[..., :1] * scales, -ends[..., 1:] * minima


def _pairs(packed: Raw) -> Bytes:
    """(..., 128) bytes -> (..., 8, 32): each 32 bytes hold one block in their low halves and the next in the high."""
    return _nibbles(packed.reshape(*packed.shape[:-1], 4, 32)).reshape(*packed.shape[:-1], 8, 32)


def _q4_k(raw: Raw) -> tuple[str, Bytes, Floats, Floats | None]:
    block, scales, minima = _k(raw, 144)
    return "Q4W", _pairs(block[..., 16:]), scales, minima


def _q5_k(raw: Raw) -> tuple[str, Bytes, Floats, Floats | None]:
    block, scales, minima = _k(raw, 176)
    bits = np.unpackbits(block[..., 16:48, None], axis=-1, bitorder="little")  # (..., 32, 8): bit b of block b
    return "Q8W", _pairs(block[..., 48:]) | np.swapaxes(bits, -1, -2) * np.uint8(16), scales, minima


def _q6_k(raw: Raw) -> tuple[str, Bytes, Floats, Floats | None]:
    block = _blocks(raw, 210)
    low = block[..., :128].reshape(*block.shape[:-1], 2, 64)
    high = block[..., 128:192].reshape(*block.shape[:-1], 2, 32)
    upper = np.concatenate([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], axis=-1)
    q = _nibbles(low) | upper  # (..., 2, 128), around 32
    scales = np.ascontiguousarray(block[..., 192:208]).view(np.int8).astype(np.float32) * _halves(block[..., 208:])
    return "Q8S", q + np.uint8(96), scales, None  # the kernels' zero is 128


_READERS: dict[str, Callable[[Raw], tuple[str, Bytes, Floats, Floats | None]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
KINDS = frozenset(_READERS)
"""GGUF types whose blocks are kept."""


def from_gguf(kind: str, raw: Raw) -> Packed:
    """The blocks of a GGUF tensor, (outputs, bytes a row), as they are."""
    form, q, scales, minima = _READERS[kind](raw)
    outputs = raw.shape[0]
    q = q.reshape(outputs, -1)
    return Packed(
        *(form, outputs, q.shape[1]),
        q=q,
        scales=scales.reshape(outputs, -1),
        minima=None if minima is None else minima.reshape(outputs, -1),
    )


def halves_apart(rows: int, head_size: int) -> Rows:
    """The order that takes query or key rows whose heads have their two halves interleaved to one half after another.

    Converters to GGUF interleave them in some architectures.
    """
    return np.arange(rows).reshape(-1, head_size // 2, 2).swapaxes(1, 2).reshape(-1)


def to_int8(weight: Tensor) -> Packed:
    """Symmetric rounding to 8 bits in blocks of 32 inputs with an fp16 scale (the arithmetic of GGUF's Q8_0)."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % BLOCK)).view(outputs, -1, BLOCK)
    scales = (padded.abs().amax(-1) / 127).half().float()
    q = (padded / scales.clamp_min(1e-30)[..., None]).round().clamp_(-127, 127) + 128
    return Packed(*("Q8", outputs, inputs), q=q.to(torch.uint8).view(outputs, -1).numpy(), scales=scales.numpy())


def values(packed: Packed) -> Floats:
    """The weights that the blocks represent: (outputs, inputs) float32."""
    assert packed.q is not None and packed.scales is not None
    scales = packed.scales
    size = packed.q.shape[1] // scales.shape[1]
    q = packed.q.reshape(packed.outputs, -1, size).astype(np.float32)
    if packed.minima is not None:
        found = q * scales[..., None] + packed.minima[..., None]
    else:
        found = (q - (8 if packed.format == "Q4" else 128)) * scales[..., None]
    return found.reshape(packed.outputs, -1)[:, : packed.inputs]


def stack(parts: list[Packed]) -> Packed:
    """One matrix of all rows, one part below the other. The parts have the same format and inputs."""
    arrays = {name: _joined([getattr(part, name) for part in parts]) for name in ("rows", "q", "scales", "minima")}
    outputs = sum(part.outputs for part in parts)
    return Packed(parts[0].format, outputs, parts[0].inputs, **arrays, bias=_biases(parts))


def _joined(arrays: list[Any]) -> Any:
    return None if arrays[0] is None else np.concatenate(arrays)


def taken(packed: Packed, rows: Rows) -> Packed:
    """The matrix of these rows, in this order; -1 is a row of zeros."""

    def chosen(array: Any) -> Any:
        if array is None:
            return None
        found = array[rows]
        found[rows < 0] = 0
        return found

    arrays = (packed.rows, packed.q, packed.scales, packed.minima, packed.bias)
    return Packed(packed.format, len(rows), packed.inputs, *(chosen(array) for array in arrays))


def _biases(parts: list[Packed]) -> Floats | None:
    if all(part.bias is None for part in parts):
        return None
    return np.concatenate([np.zeros(part.outputs, np.float32) if part.bias is None else part.bias for part in parts])

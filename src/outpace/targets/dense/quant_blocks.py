"""Quantised weights in blocks of whole numbers: those of GGUF files, and our own rounding to 8 bits.

Every kind becomes ``w = scale * q + minimum`` (or ``scale * (q - zero)``) with q unsigned, one scale for each block of
16 or 32 inputs. That is an exact rewriting of the file's blocks, not another quantisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.targets.dense.binding import BLOCK, Bytes, Floats, Packed

Raw = npt.NDArray[np.uint8]
"""A tensor's rows as they lie in the file: (outputs, bytes)."""
Rows = npt.NDArray[np.int64]
"""Numbers of rows."""


_Parts = tuple[Bytes, Floats, Floats | None]
"""Numbers, scales and minima of some rows."""


def _halves(raw: Raw) -> Floats:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Raw) -> Bytes:
    """(..., n) bytes -> (..., 2n): all low halves, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _blocks(raw: Raw, size: int) -> Raw:
    return raw.reshape(raw.shape[0], -1, size)


def _q4_0(raw: Raw) -> _Parts:
    block = _blocks(raw, 18)
    return _nibbles(block[..., 2:]), _halves(block[..., :2])[..., 0], None


def _q4_1(raw: Raw) -> _Parts:
    block = _blocks(raw, 20)
    ends = _halves(block[..., :4])
    return _nibbles(block[..., 4:]), ends[..., 0], ends[..., 1]


def _fifth_bits(raw: Raw) -> Bytes:
    """(..., 4) bytes of 32 single bits -> (..., 32) of 0 or 16."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little") * np.uint8(16)


def _q5_0(raw: Raw) -> _Parts:
    block = _blocks(raw, 22)
    scale = _halves(block[..., :2])[..., 0]
    return _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6]), scale, -16 * scale


def _q5_1(raw: Raw) -> _Parts:
    block = _blocks(raw, 24)
    ends = _halves(block[..., :4])
    return _nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8]), ends[..., 0], ends[..., 1]


def _q8_0(raw: Raw) -> _Parts:
    block = _blocks(raw, 34)
    return block[..., 2:] ^ np.uint8(0x80), _halves(block[..., :2])[..., 0], None


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


def _q4_k(raw: Raw) -> _Parts:
    block, scales, minima = _k(raw, 144)
    return _pairs(block[..., 16:]), scales, minima


def _q5_k(raw: Raw) -> _Parts:
    block, scales, minima = _k(raw, 176)
    bits = np.unpackbits(block[..., 16:48, None], axis=-1, bitorder="little")  # (..., 32, 8): bit b of block b
    return _pairs(block[..., 48:]) | np.swapaxes(bits, -1, -2) * np.uint8(16), scales, minima


def _q6_k(raw: Raw) -> _Parts:
    block = _blocks(raw, 210)
    low = block[..., :128].reshape(*block.shape[:-1], 2, 64)
    high = block[..., 128:192].reshape(*block.shape[:-1], 2, 32)
    upper = np.concatenate([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], axis=-1)
    q = _nibbles(low) | upper  # (..., 2, 128), around 32
    scales = np.ascontiguousarray(block[..., 192:208]).view(np.int8).astype(np.float32) * _halves(block[..., 208:])
    return q + np.uint8(96), scales, None  # the kernels' zero is 128


_READERS: dict[str, tuple[str, int, Callable[[Raw], _Parts]]] = {
    "Q4_0": ("Q4", 32, _q4_0),
    "Q4_1": ("Q4M", 32, _q4_1),
    "Q5_0": ("Q8W", 32, _q5_0),
    "Q5_1": ("Q8W", 32, _q5_1),
    "Q8_0": ("Q8", 32, _q8_0),
    "Q4_K": ("Q4W", 256, _q4_k),
    "Q5_K": ("Q8W", 256, _q5_k),
    "Q6_K": ("Q8S", 256, _q6_k),
}
"""The kernels' format of each kind, inputs of a block (or block of blocks), and what takes blocks apart."""
_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
"""Of a block, or block of blocks."""
KINDS = frozenset(_READERS)
"""GGUF types whose blocks are kept."""
_AT_ONCE = 2**18
"""Bytes of blocks that are taken apart at once: what comes of them stays in the processor's caches."""


@dataclass(slots=True)
class Blocks:
    """A matrix in blocks as GGUF files have them. Rows are moved while they are small, before they are taken apart."""

    kind: str
    raw: Raw
    bias: Floats | None = None

    @property
    def format(self) -> str:
        """The kernels' name of what it becomes."""
        return _READERS[self.kind][0]

    @property
    def outputs(self) -> int:
        """Rows."""
        return len(self.raw)

    def packed(self) -> Packed:
        """The blocks as the kernels take them. Raises BadInput for a scale that is not finite."""
        form, size, read = _READERS[self.kind]
        outputs, width = self.raw.shape
        inputs = width // _BYTES[self.kind] * size
        found: list[Any] = []
        step = max(1, _AT_ONCE // max(width, 1))
        for start in range(0, outputs, step):
            rows = self.raw[start : start + step]
            parts = [None if one is None else one.reshape(len(rows), -1) for one in read(rows)]
            if not found:
                found = [None if one is None else np.empty((outputs, one.shape[1]), one.dtype) for one in parts]
            for whole, one in zip(found, parts, strict=True):
                if one is not None:
                    whole[start : start + step] = one
        q, scales, minima = found
        if not all(one is None or np.isfinite(one).all() for one in (scales, minima)):
            raise BadInput("its blocks have values that are not finite")
        return Packed(form, outputs, inputs, q=q, scales=scales, minima=minima, bias=self.bias)


def from_gguf(kind: str, raw: Raw) -> Packed:
    """The blocks of a GGUF tensor, (outputs, bytes a row), as they are."""
    return Blocks(kind, raw).packed()


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


def values(matrix: Packed | Blocks) -> Floats:
    """The weights that the blocks represent: (outputs, inputs) float32."""
    packed = unpacked(matrix)
    assert packed.q is not None and packed.scales is not None
    scales = packed.scales
    size = packed.q.shape[1] // scales.shape[1]
    q = packed.q.reshape(packed.outputs, -1, size).astype(np.float32)
    if packed.minima is not None:
        found = q * scales[..., None] + packed.minima[..., None]
    else:
        found = (q - (8 if packed.format == "Q4" else 128)) * scales[..., None]
    return found.reshape(packed.outputs, -1)[:, : packed.inputs]


def unpacked(matrix: Packed | Blocks) -> Packed:
    """The matrix as the kernels take it."""
    return matrix.packed() if isinstance(matrix, Blocks) else matrix


def stack(parts: Sequence[Packed | Blocks]) -> Packed | Blocks:
    """One matrix of all rows, one part below the other. The parts have the same format and inputs."""
    kinds = {one.kind if isinstance(one, Blocks) else None for one in parts}
    first = parts[0]
    if isinstance(first, Blocks) and len(kinds) == 1:
        return Blocks(first.kind, np.concatenate([one.raw for one in parts if isinstance(one, Blocks)]), _biases(parts))
    whole = [unpacked(one) for one in parts]
    arrays = {name: _joined([getattr(part, name) for part in whole]) for name in ("rows", "q", "scales", "minima")}
    outputs = sum(part.outputs for part in parts)
    return Packed(first.format, outputs, whole[0].inputs, **arrays, bias=_biases(parts))


def _joined(arrays: list[Any]) -> Any:
    return None if arrays[0] is None else np.concatenate(arrays)


def taken(packed: Packed | Blocks, rows: Rows) -> Packed | Blocks:
    """The matrix of these rows, in this order; -1 is a row of zeros."""

    def chosen(array: Any) -> Any:
        if array is None:
            return None
        found = array[rows]
        found[rows < 0] = 0
        return found

    if isinstance(packed, Blocks):
        return Blocks(packed.kind, chosen(packed.raw), chosen(packed.bias))
    arrays = (packed.rows, packed.q, packed.scales, packed.minima, packed.bias)
    return Packed(packed.format, len(rows), packed.inputs, *(chosen(array) for array in arrays))


def _biases(parts: Sequence[Packed | Blocks]) -> Floats | None:
    if all(part.bias is None for part in parts):
        return None
    return np.concatenate([np.zeros(part.outputs, np.float32) if part.bias is None else part.bias for part in parts])

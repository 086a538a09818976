"""Quantised weights in the blocks of GGUF files: those of a file, and our own rounding to 8 bits.

Nothing here takes blocks apart: a matrix is the addresses of its rows, and the kernels pack them from there
(native/packing.cpp). That is an exact rewriting of the blocks, not another quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.targets.dense.binding import BLOCK, Floats, Packed

Raw = npt.NDArray[np.uint8]
"""A tensor's rows as they lie in the file: (outputs, bytes)."""
Rows = npt.NDArray[np.int64]
"""Numbers of rows."""

_KINDS = {
    "Q4_0": ("Q4", 32, 18),
    "Q4_1": ("Q4M", 32, 20),
    "Q5_0": ("Q5", 32, 22),
    "Q5_1": ("Q5M", 32, 24),
    "Q8_0": ("Q8", 32, 34),
    "Q4_K": ("Q4K", 256, 144),
    "Q5_K": ("Q5K", 256, 176),
    "Q6_K": ("Q6K", 256, 210),
}
"""The kernels' format of each kind, and the inputs and bytes of a block (or super-block)."""
KINDS = frozenset(_KINDS)
"""GGUF types whose blocks are kept."""


def from_gguf(kind: str, raw: Raw, order: Rows | None = None) -> Packed:
    """The blocks of a GGUF tensor, (outputs, bytes a row), as they are. ``order``: of its rows, for the model's."""
    form, size, width = _KINDS[kind]
    raw = raw if raw.strides[1] == 1 else np.ascontiguousarray(raw)
    rows = np.arange(len(raw)) if order is None else order
    blocks = raw.ctypes.data + raw.strides[0] * rows
    return Packed(form, len(rows), raw.shape[1] // width * size, blocks=blocks, kept=(raw,))


def halves_apart(rows: int, head_size: int) -> Rows:
    """The order that takes query or key rows whose heads have their two halves interleaved to one half after another.

    Converters to GGUF interleave them in some architectures.
    """
    return np.arange(rows).reshape(-1, head_size // 2, 2).swapaxes(1, 2).reshape(-1)


def to_int8(weight: Tensor) -> Packed:
    """Symmetric rounding to 8 bits in blocks of 32 inputs with an fp16 scale (GGUF's Q8_0)."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % BLOCK)).view(outputs, -1, BLOCK)
    scales = (padded.abs().amax(-1) / 127).half()
    q = (padded / scales.float().clamp_min(1e-30)[..., None]).round().clamp_(-127, 127).to(torch.int8)
    raw = torch.cat([scales[..., None].view(torch.int8), q], dim=-1)
    packed = from_gguf("Q8_0", raw.view(torch.uint8).view(outputs, -1).numpy())
    packed.inputs = inputs
    return packed


def stack(parts: Sequence[Packed]) -> Packed:
    """One matrix of all rows, one part below the other. The parts have the same format and inputs."""
    rows, blocks = (_joined([getattr(part, name) for part in parts]) for name in ("rows", "blocks"))
    outputs, kept = sum(part.outputs for part in parts), tuple(array for part in parts for array in part.kept)
    return Packed(parts[0].format, outputs, parts[0].inputs, rows, blocks, _biases(parts), kept)


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

    floats, blocks, bias = (chosen(array) for array in (packed.rows, packed.blocks, packed.bias))
    return Packed(packed.format, len(rows), packed.inputs, floats, blocks, bias, packed.kept)


def _biases(parts: Sequence[Packed]) -> Floats | None:
    if all(part.bias is None for part in parts):
        return None
    return np.concatenate([np.zeros(part.outputs, np.float32) if part.bias is None else part.bias for part in parts])

"""Packing the weights of a DecoderSpec for the compiled kernels, in one of the precisions.

``float32`` and ``bfloat16`` are plain. ``int8``: every matrix in blocks of 32 with an fp16 scale. ``int4``: the blocks
of the GGUF file as they lie there; what the file keeps in other formats stays as exact as bfloat16 holds it.
Inputs of quantised matrices are rounded to 8 bits in blocks of 32 as they come. K/V is float32 in float32, and
bfloat16 or 8-bit numbers with scales in the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.models.gguf_header import read_header
from outpace.targets.dense import quant_blocks
from outpace.targets.dense.binding import ACTIVATIONS, KV_FORMATS, LANES, NORMS, SLOTS, Packed, Shape
from outpace.targets.dense.decoder_spec import DecoderSpec, LayerSpec, Matrix
from outpace.targets.dense.native_model import NativeModel

PRECISIONS = ("float32", "bfloat16", "int8", "int4")


def pack(
    spec: DecoderSpec, precision: str, gguf: Path | None = None, kv_format: str = "float32"
) -> tuple[NativeModel, dict[str, int]]:
    """The packed model, and its weights by the format that they are in.

    ``gguf``: the file whose blocks int4 keeps; ``kv_format``: one of ``binding.KV_FORMATS``.

    Raises BadInput for int4 without a file, and for weights that are not on the CPU, where the kernels run.
    """
    if spec.device.type != "cpu":
        raise BadInput(f"its weights are on {spec.device}")
    if precision == "int4" and gguf is None and not spec.in_blocks:
        raise BadInput("int4 keeps the blocks of a GGUF file, and this model is not one; use int8")
    source = _Source(precision, _FileBlocks(gguf, spec.head_size) if gguf is not None and precision == "int4" else None)
    model = NativeModel(
        Shape(
            *(len(spec.layers), spec.hidden, spec.heads, spec.kv_heads, spec.head_size, spec.intermediate),
            *(spec.vocabulary, ACTIVATIONS[spec.activation], KV_FORMATS[kv_format]),
            *(spec.epsilon, spec.attention_scale, spec.softcap, spec.embedding_scale),
        )
    )
    _pack_ends(model, spec, source)  # the largest first, while there is little else in memory
    for index, layer in enumerate(spec.layers):
        _pack_layer(model, index, layer, source)
    model.set_norm(-1, 0, np.empty(0, np.float32) if spec.final_norm is None else source.norm(spec.final_norm))
    if spec.second_norm is not None:
        model.set_norm(-1, 1, source.norm(spec.second_norm))
    if spec.entry is not None:
        model.set_matrix(-1, 2, source(spec.entry.matrix))
        for slot, one in ((2, spec.entry.before), (3, spec.entry.after)):
            if one is not None:
                model.set_norm(-1, slot, source.norm(one))
    return model, source.formats


def _pack_ends(model: NativeModel, spec: DecoderSpec, source: _Source) -> None:
    model.set_matrix(-1, 0, source(spec.embedding))
    model.set_matrix(-1, 1, None if spec.lm_head is None else source(spec.lm_head))  # None: as just packed


def _pack_layer(model: NativeModel, index: int, layer: LayerSpec, source: _Source) -> None:
    qkv = [source(one) for one in (layer.query, layer.key, layer.value)]
    if len({one.format for one in qkv}) == 1:
        qkv = [quant_blocks.stack(qkv)]
    for slot, one in enumerate(qkv):
        model.set_matrix(index, slot, one)
    model.set_matrix(index, SLOTS["out"], source(layer.out))
    model.set_matrix(index, SLOTS["gate_up"], _alternating(*source.alike(layer.gate, layer.up)))
    model.set_matrix(index, SLOTS["down"], source(layer.down))
    for name, norm in layer.norms.items():
        model.set_norm(index, NORMS[name], source.norm(norm))
    model.set_layer(index, layer.window, layer.rotation)


def _alternating(gate: Packed, up: Packed) -> Packed:
    """Sixteen rows of one, sixteen of the other, so that a thread that has made both can multiply them at once."""
    count = gate.outputs
    padded = -(-count // LANES) * LANES
    rows = np.full((padded // LANES, 2, LANES), -1)
    flat = np.where(np.arange(padded) < count, np.arange(padded), -1).reshape(-1, LANES)
    rows[:, 0] = flat
    rows[:, 1] = np.where(flat < 0, -1, flat + count)
    return quant_blocks.taken(quant_blocks.stack([gate, up]), rows.reshape(-1))


class _Source:
    """Matrices in the asked precision, counted by format."""

    def __init__(self, precision: str, file: _FileBlocks | None) -> None:
        self.precision = precision
        self.file = file
        self.formats: dict[str, int] = {}

    def __call__(self, matrix: Matrix) -> Packed:
        return self.alike(matrix)[0]

    def alike(self, *matrices: Matrix) -> list[Packed]:
        """Matrices that must be of one format: in floating point where their own formats differ."""
        packed = [self._packed(matrix) for matrix in matrices]
        if len({one.format for one in packed}) > 1:
            packed = [self._plain(matrix) for matrix in matrices]
        for one, matrix in zip(packed, matrices, strict=True):
            one.bias = None if matrix.bias is None else matrix.bias.float().numpy()
            self.formats[one.format] = self.formats.get(one.format, 0) + matrix.weight.numel()
        return packed

    def _plain(self, matrix: Matrix) -> Packed:
        form = "F32" if self.precision == "float32" else "BF16"
        outputs, inputs = matrix.weight.shape
        return Packed(form, outputs, inputs, matrix.rows().numpy())

    def norm(self, norm: Matrix) -> Any:
        """A norm's weights; the file's own where there is one, for they are kept in full precision there."""
        found = self.file.floats(norm.name) if self.file is not None else None
        if found is None or found.shape != norm.weight.shape:
            return norm.weight.numpy()
        return (found if torch.allclose(found, norm.weight, rtol=1e-2, atol=1e-3) else norm.weight).numpy()

    def _packed(self, matrix: Matrix) -> Packed:
        if matrix.stored is not None and self.precision == "int4":
            return matrix.stored.blocks()
        if self.precision == "int8":
            return quant_blocks.to_int8(matrix.rows())
        if self.file is not None and (found := self.file.matrix(matrix)) is not None:
            return found
        return self._plain(matrix)


class _FileBlocks:
    """Tensors of a GGUF file."""

    def __init__(self, path: Path, head_size: int) -> None:
        self._header = read_header(path)
        self._head_size = head_size

    def floats(self, name: str) -> Tensor | None:
        """A float32 tensor, or None when there is none of the name."""
        entry = self._header.tensors.get(f"{name}.weight")
        if entry is None or entry.kind_name != "F32":
            return None
        return torch.from_numpy(self._header.float32(f"{name}.weight"))

    def matrix(self, matrix: Matrix) -> Packed | None:
        """The file's blocks of a matrix, its rows in the model's order; None where the file has no such blocks.

        Converters to GGUF put the rows of query and key projections in another order in some architectures; the
        order is the one under which the blocks stand for the weights that transformers made of them.
        """
        name = f"{matrix.name}.weight"
        entry = self._header.tensors.get(name)
        if entry is None or entry.kind_name not in quant_blocks.KINDS or entry.shape != tuple(matrix.weight.shape):
            return None
        raw = self._header.mapped(name)
        for order in _orders(matrix, self._head_size):
            if _stand_for(entry.kind, raw, matrix.weight, order):
                return quant_blocks.from_gguf(entry.kind_name, raw, order)
        return None


def _orders(matrix: Matrix, head_size: int) -> list[Any]:
    """Row orders to try: the file's own, and for queries and keys the interleaving of each head's halves."""
    if not matrix.name.endswith(("attn_q", "attn_k")):
        return [None]
    return [None, quant_blocks.halves_apart(matrix.weight.shape[0], head_size)]


def _stand_for(kind: int, raw: quant_blocks.Raw, weight: Tensor, order: Any) -> bool:
    """Whether the blocks, in this order, are the weights up to the rounding of their dtype; looks at some rows."""
    from gguf import GGMLQuantizationType, dequantize

    some = np.unique(np.linspace(0, len(raw) - 1, 64).astype(np.int64))
    found = dequantize(raw[some if order is None else order[some]], GGMLQuantizationType(kind))
    return bool(np.allclose(found, weight[torch.from_numpy(some)].float().numpy(), rtol=1e-2, atol=1e-6))

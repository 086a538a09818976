"""The compiled kernels from Python: structures, calls and errors. Mirrors ``native/api.h``; knows no model."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from outpace.core.errors import OutpaceError
from outpace.targets.dense.kernel_build import library

FORMATS = ("F32", "BF16", "Q8", "Q4", "Q4M", "Q5", "Q5M", "Q4K", "Q5K", "Q6K")
"""How a matrix is packed; explained in native/formats.h."""
SLOTS = {"qkv0": 0, "qkv1": 1, "qkv2": 2, "out": 3, "gate_up": 4, "down": 5}
NORMS = {"norm1": 0, "norm2": 1, "post1": 2, "post2": 3, "query": 4, "key": 5}
ACTIVATIONS = {"silu": 1, "gelu_pytorch_tanh": 2}
KV_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
"""How K/V is kept; explained in native/key_values.h."""
LANES, BLOCK = 16, 32

Floats = npt.NDArray[np.float32]


class Shape(Structure):
    """outpace_shape: the model's sizes and constants."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate")),
        *((name, c_int32) for name in ("vocabulary", "activation", "kv_format")),
        *((name, c_float) for name in ("epsilon", "attention_scale", "softcap", "embedding_scale")),
    ]


class _Matrix(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("format", "outputs", "inputs")),
        *((name, c_void_p) for name in ("rows", "blocks", "bias")),
    ]


class PartRecord(Structure):
    """outpace_part: one sequence's share of a forward, by addresses."""

    _fields_ = [
        *((name, c_int32) for name in ("first", "rows", "old", "committed", "capacity", "causal")),
        *((name, c_int32) for name in ("side_rows", "lays_root")),
        *((name, c_void_p) for name in ("store", "side", "positions", "seen_start", "seen", "subset")),
        *((name, c_int32) for name in ("subset_count", "subset_by_head")),
    ]


class ForwardRecord(Structure):
    """outpace_forward: what one call runs."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "parts", "start", "stop")),
        *((name, c_void_p) for name in ("tokens", "states", "before", "second", "words")),
        *((name, c_void_p) for name in ("skip_attention", "skip_mlp")),
        ("part", POINTER(PartRecord)),
        ("taps", c_int32),
        *((name, c_void_p) for name in ("tap_layers", "tap_rows")),
        ("tap_normed", c_int32),
        ("queries", c_void_p),
        ("logits", c_void_p),
        ("logit_stride", c_int64),
        ("best", c_void_p),
    ]


class CommitmentRecord(Structure):
    """outpace_commitment."""

    _fields_ = [
        *((name, c_void_p) for name in ("store", "side", "chosen")),
        *((name, c_int32) for name in ("capacity", "length", "side_rows", "rows")),
    ]


@dataclass(slots=True)
class Packed:
    """A matrix on its way to being packed: ``rows`` (outputs, inputs) of floats, or rows in blocks.

    ``blocks``: (outputs) addresses of the rows as GGUF files have them, 0 for a row of zeros; they point into the
    arrays ``kept``.
    """

    format: str
    outputs: int
    inputs: int
    rows: Floats | None = None
    blocks: npt.NDArray[np.int64] | None = None
    bias: Floats | None = None
    kept: tuple[Any, ...] = ()

    def record(self) -> _Matrix:
        """The structure that the kernels read; valid while this object lives."""
        for name in ("rows", "blocks", "bias"):
            array = getattr(self, name)
            if array is not None:
                setattr(self, name, np.ascontiguousarray(array))
        pointers = (None if one is None else one.ctypes.data for one in (self.rows, self.blocks, self.bias))
        return _Matrix(FORMATS.index(self.format), self.outputs, self.inputs, *pointers)


@cache
def calls() -> Any:
    """The kernels' functions; each is declared in ``native/api.h``."""
    lib = library()
    lib.outpace_error.restype = ctypes.c_char_p
    lib.outpace_features.restype = ctypes.c_char_p
    lib.outpace_create.restype = c_void_p
    lib.outpace_create.argtypes = [c_void_p]
    lib.outpace_destroy.restype = None
    lib.outpace_destroy.argtypes = [c_void_p]
    lib.outpace_bytes.restype = c_int64
    lib.outpace_bytes.argtypes = [c_void_p]
    integer = ctypes.c_int
    lib.outpace_read_rate.restype = ctypes.c_double
    lib.outpace_read_rate.argtypes = [integer, c_int64]
    lib.outpace_product_rate.restype = ctypes.c_double
    lib.outpace_product_rate.argtypes = [integer, integer]
    lib.outpace_set_matrix.argtypes = [c_void_p, integer, integer, c_void_p]
    lib.outpace_set_norm.argtypes = [c_void_p, integer, integer, c_void_p, integer]
    lib.outpace_set_layer.argtypes = [c_void_p, integer, integer, integer]
    lib.outpace_set_rotation.argtypes = [c_void_p, integer, c_void_p, c_void_p, integer, integer]
    lib.outpace_top.restype = None
    lib.outpace_top.argtypes = [c_void_p, c_int64, c_int64, c_int64, integer, c_void_p, c_void_p, c_float, c_void_p]
    lib.outpace_set_threads.argtypes = [integer]
    lib.outpace_run.argtypes = [c_void_p, c_void_p]
    lib.outpace_embed.argtypes = [c_void_p, c_void_p, integer, c_void_p]
    lib.outpace_commit.argtypes = [c_void_p, c_void_p, integer]
    lib.outpace_read_keys.argtypes = [c_void_p, c_void_p, integer, integer, integer, c_void_p]
    lib.outpace_kv_row_bytes.argtypes = [c_void_p]
    lib.outpace_branches_create.restype = c_void_p
    lib.outpace_branches_create.argtypes = [c_void_p, c_void_p, integer, integer]
    lib.outpace_branches_destroy.restype = None
    lib.outpace_branches_destroy.argtypes = [c_void_p]
    lib.outpace_branches_begin.argtypes = [c_void_p, c_void_p, integer, c_void_p, c_void_p]
    lib.outpace_branches_grow.argtypes = [c_void_p, integer, c_void_p, c_void_p, c_void_p]
    lib.outpace_branches_draft.argtypes = [c_void_p, c_void_p, integer, c_void_p, c_void_p, c_void_p]
    lib.outpace_copy_rows.restype = None
    lib.outpace_copy_rows.argtypes = [c_void_p, c_void_p, integer, integer]
    return lib


def check(status: int) -> None:
    """Raise OutpaceError for what a call returned, unless that is 0."""
    if status:
        raise OutpaceError(f"the compiled kernels failed: {calls().outpace_error().decode()}")


def features() -> str:
    """Instruction sets that the kernels use, such as ``avx512 bf16-dot int8-dot``; ``tiles`` is Intel AMX."""
    return str(calls().outpace_features().decode()).strip()


def read_rate(threads: int, megabytes: int) -> float:
    """Bytes a second that ``threads`` threads read from memory together."""
    return float(calls().outpace_read_rate(threads, megabytes * 2**20))


def product_rate(threads: int, precision: str) -> float:
    """Operations a second of the products that a precision's matrices are made of; the processor's limit."""
    kind = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 2}[precision]
    return float(calls().outpace_product_rate(threads, kind))


def loaded() -> bool:
    """Whether this process has loaded the kernels: small helpers use them then, and never have them built."""
    return calls.cache_info().currsize > 0


def top(
    logits: Tensor, k: int, inverse_temperature: float = 1.0, totals: Floats | None = None
) -> tuple[list[list[float]], list[list[int]]]:
    """Values and places of the ``k`` <= V largest of every row of (n, V) float32 on the CPU, largest first.

    ``totals``, (n,), is filled with the log of the sum of each row's exponentials, all times ``inverse_temperature``.
    """
    count, width = logits.shape
    values, ids = np.empty((count, k), np.float32), np.empty((count, k), np.int32)
    found = (values.ctypes.data, ids.ctypes.data, inverse_temperature, None if totals is None else totals.ctypes.data)
    calls().outpace_top(logits.data_ptr(), count, width, logits.stride(0), k, *found)
    return values.tolist(), ids.tolist()


def copy_rows(sources: array[int], targets: array[int], width: int) -> None:
    """Copy ``width`` floats from each address to the one beside it, both 64 bits."""
    calls().outpace_copy_rows(sources.buffer_info()[0], targets.buffer_info()[0], len(sources), width)

"""The compiled kernels from Python: structures, calls and errors. Mirrors ``native/api.h``; knows no model."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Seq
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from outpace.core.errors import BadInput, OutpaceError
from outpace.core.turns import ROUNDS
from outpace.targets.dense.kernel_build import library
from outpace.targets.threads import threads

FORMATS = ("F32", "BF16", "Q8", "Q4", "Q4M", "Q5", "Q5M", "Q4K", "Q5K", "Q6K")
"""How a matrix is packed; explained in native/formats.h."""
SLOTS = {"qkv0": 0, "qkv1": 1, "qkv2": 2, "out": 3, "gate_up": 4, "down": 5}
NORMS = {"norm1": 0, "norm2": 1, "post1": 2, "post2": 3, "query": 4, "key": 5}
ACTIVATIONS = {"silu": 1, "gelu_pytorch_tanh": 2}
KV_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
"""How K/V is kept; explained in native/key_values.h."""
LANES, BLOCK = 16, 32
_NOT_FINITE = 2

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


class _Commitment(Structure):
    """outpace_commitment."""

    _fields_ = [
        *((name, c_void_p) for name in ("store", "side", "chosen")),
        *((name, c_int32) for name in ("capacity", "length", "side_rows", "rows")),
    ]


class Commitment(NamedTuple):
    """``rows`` of ``side`` (layers, 2, kv_heads, n, width) are to follow the ``length`` committed ones of ``store``."""

    store: Tensor
    capacity: int
    length: int
    side: Tensor
    rows: Seq[int]


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


class NativeModel:
    """A packed model. Its memory is freed with the object."""

    def __init__(self, shape: Shape) -> None:
        self._lib = calls()
        self._handle = self._lib.outpace_create(ctypes.byref(shape))
        self.head_width = -(-shape.head_size // LANES) * LANES
        """Of a head's keys, values and queries: padded to whole registers."""
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.outpace_destroy(self._handle)
            self._handle = None

    @property
    def handle(self) -> int:
        """What the kernels know it by."""
        return int(self._handle)

    @property
    def bytes(self) -> int:
        """Of packed weights."""
        return int(self._lib.outpace_bytes(self._handle))

    def set_matrix(self, layer: int, slot: int, matrix: Packed | None) -> None:
        """Pack a matrix; layer -1: the embedding (0), the LM head (1; None: the embedding again), the entry (2).

        Raises BadInput for blocks with a scale that is not finite.
        """
        record = None if matrix is None else ctypes.byref(matrix.record())
        with ROUNDS:
            check(self._lib.outpace_set_threads(threads()))
            status = self._lib.outpace_set_matrix(self._handle, layer, slot, record)
            if status == _NOT_FINITE:
                raise BadInput("its blocks have values that are not finite")
            check(status)

    def set_norm(self, layer: int, slot: int, weights: Floats) -> None:
        """Weights of a norm, none for no norm.

        Layer -1: the final one (slot 0), that of the second input (1), those before and behind the entry (2, 3).
        """
        weights = np.ascontiguousarray(weights)
        check(self._lib.outpace_set_norm(self._handle, layer, slot, weights.ctypes.data, len(weights)))

    def set_layer(self, layer: int, window: int, rotation: int) -> None:
        """Sliding window (0: none) and which rotation table."""
        check(self._lib.outpace_set_layer(self._handle, layer, window, rotation))

    def set_rotation(self, index: int, cosines: Tensor, sines: Tensor) -> None:
        """Tables (positions, rotated dimensions / 2) of float32, kept alive here."""
        positions, half = cosines.shape
        tables = cosines.data_ptr(), sines.data_ptr(), positions, 2 * half
        check(self._lib.outpace_set_rotation(self._handle, index, *tables))
        self._kept[index] = (cosines, sines)  # after the call: another thread's forward may have read the old ones

    def run(self, record: ForwardRecord) -> None:
        """One forward, on as many threads as torch is set to use.

        One at a time: the pool of threads belongs to the process.
        """
        with ROUNDS:
            check(self._lib.outpace_set_threads(threads()))
            check(self._lib.outpace_run(self._handle, ctypes.byref(record)))

    def embed(self, tokens: Tensor, rows: Tensor) -> None:
        """Fill ``rows`` (n, hidden) float32 with the embeddings of int32 ``tokens``."""
        check(self._lib.outpace_embed(self._handle, tokens.data_ptr(), len(tokens), rows.data_ptr()))

    def commit(self, commitments: Seq[Commitment]) -> None:
        """Copy rows behind the committed ones of one store each."""
        records, chosen = (_Commitment * len(commitments))(), array("i")
        for one in commitments:
            chosen.extend(one.rows)
        at = chosen.buffer_info()[0]
        for record, one in zip(records, commitments, strict=True):
            record.store, record.capacity, record.length = one.store.data_ptr(), one.capacity, one.length
            record.side, record.side_rows = one.side.data_ptr(), one.side.shape[3]
            record.chosen, record.rows = at, len(one.rows)
            at += chosen.itemsize * len(one.rows)
        with ROUNDS:
            check(self._lib.outpace_set_threads(threads()))
            check(self._lib.outpace_commit(self._handle, ctypes.addressof(records), len(commitments)))

    def read_keys(self, store: Tensor, capacity: int, start: int, stop: int, rows: Tensor) -> None:
        """Fill ``rows`` (layers, kv_heads, stop - start, width) float32 with committed keys."""
        told = store.data_ptr(), capacity, start, stop, rows.data_ptr()
        check(self._lib.outpace_read_keys(self._handle, *told))

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one head's key or value of one token."""
        return int(self._lib.outpace_kv_row_bytes(self._handle))

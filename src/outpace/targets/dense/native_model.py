"""NativeModel: a model packed for the compiled kernels, and the calls that run it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.turns import ROUNDS
from outpace.targets.dense.binding import LANES, CommitmentRecord, Floats, ForwardRecord, Packed, Shape, calls, check
from outpace.targets.threads import threads

_NOT_FINITE = 2


class Commitment(NamedTuple):
    """``rows`` of ``side`` (layers, 2, kv_heads, n, width) are to follow the ``length`` committed ones of ``store``."""

    store: Tensor
    capacity: int
    length: int
    side: Tensor
    rows: Seq[int]


class NativeModel:
    """A packed model. Its memory is freed with the object."""

    def __init__(self, shape: Shape) -> None:
        self._lib = calls()
        self._handle = self._lib.outpace_create(ctypes.byref(shape))
        self.head_width = -(-shape.head_size // LANES) * LANES
        """Of a head's keys, values and queries: padded to whole registers."""
        self._kept: dict[int, tuple[Tensor, ...]] = {}

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
        # The old ones until the call has ended: another thread's forward may read them. The new ones before it begins:
        # whatever interrupts this, what the kernels read is kept.
        self._kept[index] = (*self._kept.get(index, ()), cosines, sines)
        check(self._lib.outpace_set_rotation(self._handle, index, *tables))
        self._kept[index] = (cosines, sines)

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
        records, chosen = (CommitmentRecord * len(commitments))(), array("i")
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

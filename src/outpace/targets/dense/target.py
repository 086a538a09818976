"""DenseTarget: the fast target on a CPU, for the architectures that :mod:`outpace.targets.dense.decoder_spec` knows.

Weights are packed once; one call of the compiled kernels runs a whole forward over the rows of all trees.

Numerics: the residual stream, norms, attention and logits are float32; weights and the inputs of matrix products are in
the precision that was asked for (see :mod:`outpace.targets.dense.packing`). Every row is computed in one fixed order,
however many rows or sequences are computed beside it, so that in **every** precision the scores of a tree's node equal,
bit for bit, those of plain decoding along its path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from outpace.targets.base import SubGraph
from outpace.targets.dense.binding import LANES, ForwardRecord, PartRecord
from outpace.targets.dense.decoder_spec import DecoderSpec
from outpace.targets.dense.kv import DenseKV
from outpace.targets.dense.packing import KV_DTYPES, pack
from outpace.targets.rows import PREFILL_CHUNK, Part, Plan, RowTarget
from outpace.targets.threads import torch_at_rest

_FIRST_POSITIONS = 2048
_UNITS = 64


class DenseTarget(RowTarget):
    """A target on packed weights. Raises BadInput for a precision that the model cannot be packed in.

    The blueprint's tensors are not needed once this is built. ``words``: whose embeddings layer 0 reads beside its
    rows, in blueprints where it does.
    """

    def __init__(
        self,
        plan: DecoderSpec,
        precision: str = "float32",
        *,
        gguf: Path | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        words: DenseTarget | None = None,
    ) -> None:
        packing = pack(plan, precision, gguf)
        self.native = packing.model
        self.formats = packing.formats
        self.dtype = precision
        self.vocab_size = plan.vocabulary
        self.num_layers = len(plan.layers)
        self.hidden_size = plan.hidden
        self.context_length, self.context_note = plan.context_length, plan.context_note
        self.prefill_chunk = prefill_chunk
        self._words = None if words is None else words.native
        self.device = torch.device("cpu")
        self._kv_shape = (self.num_layers, 2, plan.kv_heads)
        self._kv_dtype = KV_DTYPES[precision]
        self._width = -(-plan.head_size // LANES) * LANES
        self._final_softcap = plan.final_softcap
        self._final_norm = None if plan.final_norm is None else plan.final_norm.weight.float().cpu()
        self._epsilon = plan.epsilon
        self._tied, self._embedding_scale = plan.head is None, plan.embedding_scale
        self._rotations = plan.rotations
        self._positions = 0
        self._rotate_up_to(min(_FIRST_POSITIONS, self.context_length))

    def round(self) -> AbstractContextManager[None]:
        return torch_at_rest()

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights."""
        return self.native.bytes

    def open(self) -> DenseKV:
        return DenseKV(self.native, self._kv_shape, self._width, self._kv_dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        rows = torch.empty(len(tokens), self.hidden_size)
        self.native.embed(tokens.to(torch.int32).contiguous(), rows)
        return rows

    def head(self, hidden: Tensor) -> Tensor:
        logits = self.run(Plan([], states=hidden), [0] * len(hidden), logits=True)
        assert logits is not None
        return logits

    def final_norm(self, hidden: Tensor) -> Tensor:
        rows, weight = hidden.float(), self._final_norm
        return rows if weight is None else rms_norm(rows, weight.shape, weight, self._epsilon)

    def head_rows(self, tokens: Tensor) -> Tensor:
        if self._tied:
            return self.embed(tokens) / self._embedding_scale
        # The packed matrix shows its columns by what it makes of unit vectors, which every precision holds exactly.
        columns = []
        for units in torch.split(torch.eye(self.hidden_size), _UNITS):
            logits, seen = self.head(units), self.final_norm(units).sum(-1, keepdim=True)
            if self._final_softcap:
                logits = self._final_softcap * torch.atanh(logits / self._final_softcap)
            columns.append(logits[:, tokens] / seen)
        return torch.cat(columns).T.contiguous()

    def run(
        self, plan: Plan, tokens: Seq[int], *, logits: bool, embeddings: Mapping[int, Tensor] | None = None
    ) -> Tensor | None:
        rows = len(tokens)
        states = plan.states
        if embeddings:
            states = self.embed(torch.tensor(tokens))
            for row, embedding in embeddings.items():
                states[row] = embedding.to(states)
        if states is not None:
            states = states.float().contiguous()
        before = None if plan.before is None else plan.before.float().contiguous()
        kept: list[Any] = []  # what the kernels read must live until they are done
        parts = (PartRecord * max(len(plan.parts), 1))()
        for record, part in zip(parts, plan.parts, strict=False):
            self._fill(record, part, kept)
        plan.hidden_states = {layer: torch.empty(rows, self.hidden_size) for layer in sorted(plan.wanted)}
        pointers = (ctypes.c_void_p * max(len(plan.hidden_states), 1))(
            *(tap.data_ptr() for tap in plan.hidden_states.values())
        )
        # Rows of logits begin on a whole register; the padding is not shown.
        width = -(-self.vocab_size // LANES) * LANES
        out = torch.empty(rows, width) if logits else None
        record = ForwardRecord(
            *(rows, len(plan.parts), plan.start, plan.stop),
            tokens=_integers(tokens, kept) if states is None and before is None else None,
            states=None if states is None else states.data_ptr(),
            before=None if before is None else before.data_ptr(),
            second=None if plan.second is None else _integers(plan.second, kept),
            words=None if self._words is None else self._words.handle,
            skip_attention=_flags(plan.skip_attention, self.num_layers, kept),
            skip_mlp=_flags(plan.skip_mlp, self.num_layers, kept),
            part=parts,
            taps=len(plan.hidden_states),
            tap_layers=_integers(list(plan.hidden_states), kept),
            tap_rows=ctypes.addressof(pointers),
            tap_normed=plan.normed,
            logits=None if out is None else out.data_ptr(),
            logit_stride=width,
        )
        self.native.run(record)
        if out is None:
            return None
        out = out[:, : self.vocab_size]
        return self._final_softcap * torch.tanh(out / self._final_softcap) if self._final_softcap else out

    def _fill(self, record: PartRecord, part: Part, kept: list[Any]) -> None:
        store: DenseKV = part.store
        old = part.old_rows
        self._rotate_up_to(max(part.positions, default=0) + 1)
        record.first, record.rows, record.old = part.start, part.new_rows, old
        record.committed = store.length
        record.positions = _integers(part.positions, kept)
        if part.tree is None:
            store.reserve(part.new_rows)
            record.causal = 1
        else:
            paths = part.tree.seen()[old:]
            starts = [0, *accumulate(map(len, paths))]
            seen = list(chain.from_iterable(paths))
            record.seen_start, record.seen = _integers(starts, kept), _integers(seen, kept)
            part.side = torch.empty(*self._kv_shape, len(part.positions), self._width, dtype=self._kv_dtype)
            if part.old is not None:
                part.side[:, :, :, :old] = part.old
            record.side = part.side.data_ptr()
        record.store, record.capacity = store.data.data_ptr(), store.capacity
        if part.subset is not None:
            chosen = sorted(part.subset.tolist())
            record.subset, record.subset_count = _integers(chosen or [0], kept), len(chosen)

    def _rotate_up_to(self, positions: int) -> None:
        """Rotation tables for at least this many positions."""
        if positions <= self._positions:
            return
        self._positions = max(positions, min(2 * self._positions, self.context_length))
        where = torch.arange(self._positions)
        for index, rotation in enumerate(self._rotations):
            self.native.set_rotation(index, *rotation(where))

    def first_rows(self, side: Tensor, rows: int) -> Tensor:
        return side[:, :, :, :rows]

    def stacked(self, lower: Tensor, upper: Tensor, boundary: int) -> Tensor:
        upper[:boundary] = lower[:boundary]
        return upper

    def check_skips(self, graph: SubGraph) -> None:
        """Every sublayer can be skipped."""


def _flags(layers: frozenset[int], count: int, kept: list[Any]) -> int | None:
    """The address of a flag for each layer; None where none is set."""
    if not layers:
        return None
    flags = (ctypes.c_uint8 * count)(*(layer in layers for layer in range(count)))
    kept.append(flags)
    return ctypes.addressof(flags)


def _integers(values: Seq[int], kept: list[Any]) -> int | None:
    """The address of int32 numbers, None for none."""
    if not values:
        return None
    array = (ctypes.c_int32 * len(values))(*values)
    kept.append(array)
    return ctypes.addressof(array)

"""DenseTarget: the fast target on a CPU, for the architectures that :mod:`outpace.targets.dense.architectures` knows.

Weights are packed once; one call of the compiled kernels runs a whole forward over the rows of all trees.

Numerics: the residual stream, norms, softmax and logits are float32; weights and the inputs of matrix products are in
the precision that was asked for (see :mod:`outpace.targets.dense.packing`), and attention multiplies in that of K/V.
Every row is computed in one fixed order, however many rows or sequences are computed beside it, so that in **every**
precision the scores of a tree's node equal, bit for bit, those of autoregressive decoding along its path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence as Seq
from contextlib import AbstractContextManager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from outpace.core.token_distribution import OpenRows
from outpace.models.placement import check_kv_precision
from outpace.targets.branches import Begins
from outpace.targets.dense.binding import BLOCK, LANES, ForwardRecord, PartRecord
from outpace.targets.dense.decoder_spec import DecoderSpec
from outpace.targets.dense.dense_kv import DenseKV
from outpace.targets.dense.kernel_arguments import Integers, flags_address, integers_address
from outpace.targets.dense.kv_memory import KVMemory
from outpace.targets.dense.native_branches import NativeBranches
from outpace.targets.dense.native_distribution import native_distributions
from outpace.targets.dense.packing import pack
from outpace.targets.forward_plan import ForwardPlan, SequenceRows
from outpace.targets.rotary import FIRST_POSITIONS
from outpace.targets.row_target import PREFILL_CHUNK, RowTarget
from outpace.targets.threads import torch_at_rest

_UNITS = 64
_ROOT_ALONE = [[0]]
"""What the rows of an empty tree see."""


class DenseTarget(RowTarget):
    """A target on packed weights. Raises BadInput for a precision that the model or its K/V cannot be kept in.

    ``precision``: one of ``packing.PRECISIONS``; ``gguf``: the file that "int4" keeps the blocks of; ``kv_dtype``: one
    of ``placement.KV_DTYPES``. The spec's tensors are not needed once this is built. ``embeddings_of``: the target
    whose embeddings layer 0 reads beside its rows, in specs where it does. ``prefill_chunk`` in rows.
    """

    batch_invariant = True

    def __init__(
        self,
        spec: DecoderSpec,
        precision: str = "float32",
        *,
        gguf: Path | None = None,
        kv_dtype: str = "auto",
        prefill_chunk: int = PREFILL_CHUNK,
        embeddings_of: DenseTarget | None = None,
    ) -> None:
        self.kv_dtype = _kv_format(precision, kv_dtype)
        self.native, self.formats = pack(spec, precision, gguf, self.kv_dtype)
        self.dtype = precision
        self.vocab_size = spec.vocabulary
        self.num_layers = len(spec.layers)
        self.hidden_size = spec.hidden
        self.context_length, self.context_note = spec.context_length, spec.context_note
        self.prefill_chunk = prefill_chunk
        self._embeddings_of = None if embeddings_of is None else embeddings_of.native
        self._heads = spec.heads
        self._kv_shape = (self.num_layers, 2, spec.kv_heads)
        self._kv_memory = KVMemory()
        self.kv_bytes_per_token = 2 * self.num_layers * spec.kv_heads * self.native.kv_row_bytes
        # Of 8 bits, a row is bytes: numbers and scales.
        self._element = torch.uint8 if self.kv_dtype == "int8" else getattr(torch, self.kv_dtype)
        self._final_softcap = spec.final_softcap
        self._final_norm = None if spec.final_norm is None else spec.final_norm.weight.float().cpu()
        self._epsilon = spec.epsilon
        self._tied, self._embedding_scale = spec.lm_head is None, spec.embedding_scale
        self._rotations = spec.rotations
        self._positions = 0
        self._rotate_up_to(min(FIRST_POSITIONS, self.context_length))

    def round(self) -> AbstractContextManager[None]:
        return torch_at_rest()

    @property
    def open_rows(self) -> OpenRows:
        return native_distributions

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights."""
        return self.native.bytes

    @property
    def arithmetic(self) -> str:
        return f"{self.dtype}, K/V in int8" if self.kv_dtype == "int8" else self.dtype

    def open(self) -> DenseKV:
        return DenseKV(self.native, self._kv_shape, self._element, self._kv_memory)

    def limit_kv(self, most: int | None, planned: int = 0) -> None:
        self._kv_memory.limit(most, planned)

    def take(self, rows: Seq[tuple[DenseKV, Tensor, Seq[int]]]) -> None:
        copied = []
        for store, side_kv, chosen in rows:
            if left := store.take_laid(side_kv, chosen):  # a round without accepted draft tokens copies nothing
                copied.append(store.taking(side_kv, left))
        if copied:
            self.native.commit(copied)

    def embed(self, tokens: Tensor) -> Tensor:
        rows = _floats(len(tokens), self.hidden_size)
        self.native.embed(tokens.to(torch.int32).contiguous(), rows)
        return rows

    def lm_head(self, hidden: Tensor) -> Tensor:
        logits = self.run(ForwardPlan([], states=hidden), [0] * len(hidden), logits=True)
        assert logits is not None
        return logits

    def final_norm(self, hidden: Tensor) -> Tensor:
        rows, weight = hidden.float(), self._final_norm
        return rows if weight is None else rms_norm(rows, weight.shape, weight, self._epsilon)

    def lm_head_rows(self, tokens: Tensor) -> Tensor:
        if self._tied:
            return self.embed(tokens) / self._embedding_scale
        # The columns of the packed matrix are its products with unit vectors, which every precision holds exactly.
        columns = []
        for units in torch.split(torch.eye(self.hidden_size), _UNITS):
            logits, seen = self.lm_head(units), self.final_norm(units).sum(-1, keepdim=True)
            if self._final_softcap:
                logits = self._final_softcap * torch.atanh(logits / self._final_softcap)
            columns.append(logits[:, tokens] / seen)
        return torch.cat(columns).T.contiguous()

    def run(
        self, plan: ForwardPlan, tokens: Seq[int], *, logits: bool, embeddings: Mapping[int, Tensor] | None = None
    ) -> Tensor | None:
        rows = len(tokens)
        states = plan.states
        if embeddings:
            states = self.embed(torch.tensor(tokens))
            for row, embedding in embeddings.items():
                states[row] = embedding.to(states)
        if states is not None:
            states = states.float().contiguous()
        inputs = None if plan.entry_inputs is None else plan.entry_inputs.float().contiguous()
        kept: list[Any] = []  # what the kernels read must live until they are done
        parts = (PartRecord * max(len(plan.parts), 1))()
        lays_roots = states is None and inputs is None and plan.is_whole(self.num_layers)
        self._rotate_up_to(1 + max([position for part in plan.parts for position in part.positions], default=-1))
        numbers = Integers()
        for record, part in zip(parts, plan.parts, strict=False):
            self._fill(record, part, numbers, kept, lays_root=lays_roots)
        numbers.place()
        plan.hidden_states = {layer: _floats(rows, self.hidden_size) for layer in sorted(plan.wanted)}
        pointers = (ctypes.c_void_p * max(len(plan.hidden_states), 1))(
            *(one.data_ptr() for one in plan.hidden_states.values())
        )
        # Rows of logits begin on a whole register; the padding is not shown.
        width = -(-self.vocab_size // LANES) * LANES
        out = _floats(rows, width) if logits else None
        queries = None
        if plan.queries is not None:
            queries = _floats(self.num_layers, rows, self._heads, self.native.head_width)
            plan.queries.update((layer, queries[layer]) for layer in range(plan.start, plan.stop))
        record = ForwardRecord(
            *(rows, len(plan.parts), plan.start, plan.stop),
            tokens=integers_address(tokens, kept) if states is None and inputs is None else None,
            states=None if states is None else states.data_ptr(),
            before=None if inputs is None else inputs.data_ptr(),
            second=None if plan.second is None else integers_address(plan.second, kept),
            words=None if self._embeddings_of is None else self._embeddings_of.handle,
            skip_attention=flags_address(plan.skip_attention, self.num_layers, kept),
            skip_mlp=flags_address(plan.skip_mlp, self.num_layers, kept),
            part=parts,
            taps=len(plan.hidden_states),
            tap_layers=integers_address(list(plan.hidden_states), kept),
            tap_rows=ctypes.addressof(pointers),
            tap_normed=plan.normed,
            queries=None if queries is None else queries.data_ptr(),
            logits=None if out is None else out.data_ptr(),
            logit_stride=width,
        )
        best = None
        if plan.best is not None and logits and not self._final_softcap:  # a cap may round different logits to one
            best = (ctypes.c_int32 * rows)()
            record.best = ctypes.addressof(best)
        self.native.run(record)
        if out is None:
            return None
        if best is not None:
            plan.best = list(best)
        out = out[:, : self.vocab_size]
        return self._final_softcap * torch.tanh(out / self._final_softcap) if self._final_softcap else out

    def branches(self, begins: Begins, *, normed: bool = False) -> NativeBranches | None:
        if self._final_softcap:
            return None  # the kernels read the largest logits before a soft cap
        return NativeBranches(
            self.native,
            self._embeddings_of,
            begins,
            normed=normed,
            vocabulary=self.vocab_size,
            rotate_up_to=self._rotate_up_to,
        )

    def _fill(
        self, record: PartRecord, part: SequenceRows, numbers: Integers, kept: list[Any], *, lays_root: bool
    ) -> None:
        store: DenseKV = part.store
        earlier, rows = part.earlier_rows, len(part.positions)
        record.first, record.rows, record.old = part.start, part.new_rows, earlier
        record.committed = store.length
        numbers.add(record, "positions", part.positions)
        if part.tree is None:
            store.reserve(part.new_rows)
            record.causal = 1
        else:
            paths = _ROOT_ALONE if rows == 1 and not earlier else part.tree.seen()[earlier:]
            numbers.add(record, "seen_start", accumulate(map(len, paths), initial=0))
            numbers.add(record, "seen", chain.from_iterable(paths))
            part.side_kv = torch.empty(*self._kv_shape, rows, store.width, dtype=self._element, device="cpu")
            if part.earlier_kv is not None:
                part.side_kv[:, :, :, :earlier] = part.earlier_kv
            record.side, record.side_rows = part.side_kv.data_ptr(), rows
            if lays_root and not earlier and part.subset is None:
                # What nearly every round commits is written while the caches hold its place.
                store.reserve(1)
                store.laid = part.side_kv
                record.lays_root = 1
        record.store, record.capacity = store.data.data_ptr(), store.capacity
        if part.subset is not None:
            chosen = part.subset.to(torch.int32).contiguous()
            kept.append(chosen)
            # An empty one has no address, and none would mean all positions.
            record.subset = chosen.data_ptr() or integers_address([0], kept)
            record.subset_count, record.subset_by_head = part.committed, part.subset.dim() > 1

    def _rotate_up_to(self, positions: int) -> None:
        """Rotation tables for at least this many positions."""
        if positions <= self._positions:
            return
        longer = max(positions, min(2 * self._positions, self.context_length))
        where = torch.arange(longer, device="cpu")
        for index, rotation in enumerate(self._rotations):
            self.native.set_rotation(index, *rotation(where))
        self._positions = longer  # last: what interrupts this must not leave shorter tables than it says

    def runner_for(self, spec: DecoderSpec) -> DenseTarget | None:
        if spec.second_norm is not None and spec.hidden % BLOCK:
            return None  # the kernels lay two inputs side by side in blocks
        # A head is not in the GGUF file that int4 keeps the blocks of, and its own K/V is small.
        return DenseTarget(spec, "int8" if self.dtype in ("int4", "bfloat16") else self.dtype, embeddings_of=self)


def _floats(*shape: int) -> Tensor:
    """Memory that the kernels write, whatever torch's default type and device are now: those are the process's, and
    loading another model changes them for a while."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


def _kv_format(precision: str, kv_dtype: str) -> str:
    """How K/V is kept, one of ``binding.KV_FORMATS``. Raises BadInput."""
    if kv_dtype == "auto":
        return "float32" if precision == "float32" else "bfloat16"
    check_kv_precision(kv_dtype, precision)
    return kv_dtype

"""GraphTarget: the fast target on CUDA, for the architectures that :mod:`outpace.targets.dense.architectures` knows.

Plain PyTorch. A full forward over the trees of a batch has static shapes: each tree's rows are padded to a bucket, its
K/V lies in a buffer that stays where it is, and from the second use on the forward is one CUDA graph. Other forwards
(sub-graphs, chosen K/V, given embeddings, prefill) run eagerly. **Not yet run on a GPU**: tests run it on the CPU with
a stand-in for the capture.

Numerics: those of transformers, in the weights' precision; norms and softmax are computed in float32. How many rows a
forward has decides how matrix products round, as in every library: in float32 the difference is about 1e-5 of the
logits' size, in 16 bits near-ties of the top two logits may fall the other way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

import torch
from torch import Tensor

from outpace.targets.base import Target
from outpace.targets.dense.decoder_spec import DecoderSpec
from outpace.targets.dense.graphs import BUCKETS, LIMIT, Capture, Graphs, Step, StepKey, capture_on
from outpace.targets.dense.lanes import Contents, FixedLanes, Lane
from outpace.targets.dense.torch_kv import Pool, TorchKV
from outpace.targets.dense.torch_layers import TorchDecoder
from outpace.targets.forward_plan import ForwardPlan, SequenceRows
from outpace.targets.rotary import RotaryTable
from outpace.targets.row_target import PREFILL_CHUNK, RowTarget
from outpace.targets.threads import torch_at_work

_EXTENT = 64  # attention of an eager forward reads whole multiples of this many slots: kernels want aligned masks


class GraphTarget(RowTarget):
    """A target on the spec's weights, on their device and in their precision unless ``dtype`` says otherwise.

    Weights are partly copied and partly shared with the model (see TorchDecoder): a model must not be changed
    afterwards. ``buckets``: row counts that trees are padded to, the largest also limiting the rows of a batch;
    ``graphs``: how many are kept; ``capture`` stands in for CUDA's in tests; ``embeddings_of``: the target whose
    embeddings layer 0 reads beside its rows, in specs where it does. ``counts`` says how forwards ran.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype | None = None,
        *,
        prefill_chunk: int = PREFILL_CHUNK,
        buckets: tuple[int, ...] = BUCKETS,
        graphs: int = LIMIT,
        capture: Capture | None = None,
        embeddings_of: Target | None = None,
    ) -> None:
        self.device = spec.embedding.weight.device
        with torch.inference_mode():
            self.decoder = TorchDecoder(spec, dtype or spec.dtype)
            like = self.decoder.embedding
            self._rotary = RotaryTable(spec.rotations, like, spec.context_length)
        self.dtype = str(like.dtype).removeprefix("torch.")
        self.vocab_size = spec.vocabulary
        self.num_layers = len(spec.layers)
        self.hidden_size = spec.hidden
        self.context_length, self.context_note = spec.context_length, spec.context_note
        self.prefill_chunk = prefill_chunk
        self._embeddings_of = embeddings_of
        self._buckets = buckets
        self.graphs = Graphs(capture or capture_on(self.device), graphs)
        self.pool = Pool((self.num_layers, 2, spec.kv_heads), spec.head_size, like, self.graphs.forget)
        self.counts = self.graphs.counts

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a forward with logits reads."""
        return self.decoder.bytes

    def open(self) -> TorchKV:
        return TorchKV(self.pool)

    def limit_kv(self, most: int | None, planned: int = 0) -> None:
        self.pool.limit(most)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        return self.decoder.embed(tokens.to(self.device))

    @torch.inference_mode()
    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden.to(self.decoder.embedding))

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.decoder.normed(hidden.to(self.decoder.embedding))

    @torch.inference_mode()
    def lm_head_rows(self, tokens: Tensor) -> Tensor:
        return self.decoder.lm_head.weight[tokens.to(self.device)].float()

    @torch_at_work()
    def run(
        self, plan: ForwardPlan, tokens: Seq[int], *, logits: bool, embeddings: Mapping[int, Tensor] | None = None
    ) -> Tensor | None:
        if logits and not embeddings and _is_plain(plan, self.num_layers):
            most = max(part.new_rows for part in plan.parts)
            bucket = next((size for size in self._buckets if size >= most), None)
            if bucket is not None and bucket * len(plan.parts) <= self._buckets[-1]:
                return self._fixed(plan, tokens, bucket)
        self.counts.eager += 1
        parts = [part for part in plan.parts if part.new_rows]  # an earlier pass may have run all there is
        lanes = [self._lane(part, tokens[part.start : part.stop]) for part in parts]
        positions = [at for part in parts for at in part.positions[part.earlier_rows :]]
        turns = self._rotary.rows(torch.tensor(positions, device=self.device), max(positions, default=0))
        second = None if plan.second is None else self._second(plan.second)
        hidden = self.decoder.run(plan, self._states(plan, tokens, embeddings), lanes, turns, second, read=logits)
        for part, lane in zip(parts, lanes, strict=True):
            if part.tree is not None:
                first = part.committed
                part.side_kv = lane.cache[..., first : first + len(part.positions), :].clone()
        return self.decoder.logits(hidden) if logits else None

    def _states(self, plan: ForwardPlan, tokens: Seq[int], embeddings: Mapping[int, Tensor] | None) -> Tensor:
        """States (n, hidden) that enter the first layer that runs."""
        if plan.entry_inputs is not None:
            return self.decoder.entered(plan.entry_inputs.to(self.decoder.embedding))
        if plan.states is not None:
            return plan.states.to(self.decoder.embedding)
        hidden = self.decoder.embed(torch.tensor(tokens, device=self.device))
        for row, embedding in (embeddings or {}).items():
            hidden[row] = embedding
        return hidden

    def _second(self, tokens: Seq[int]) -> Tensor:
        """Embeddings (n, hidden) that layer 0 reads beside the residual stream."""
        target = self._embeddings_of
        assert target is not None
        return target.embed(torch.tensor(tokens, device=target.device)).to(self.decoder.embedding)

    def _lane(self, part: SequenceRows, tokens: Seq[int]) -> Lane:
        """The part's rows over its K/V in place, or over a copy of the committed positions that may be read."""
        store: TorchKV = part.store
        committed, total = part.committed, len(part.positions)
        data = store.reserve(total).data
        extent = -(-(committed + total) // _EXTENT) * _EXTENT
        cache = data[..., :extent, :]
        if part.subset is not None:
            cache = data.new_zeros(*data.shape[:3], extent, data.shape[4])
            chosen = part.subset.to(self.device)
            if chosen.dim() == 1:
                cache[..., :committed, :] = data[..., chosen, :]
            else:
                cache[..., :committed, :] = torch.take_along_dim(data, chosen[:, None, :, :, None], 3)
        lane = Lane.empty(cache, part.new_rows, total)
        if part.subset is not None:
            lane.columns = lane.columns.expand(*part.subset.shape[:-1], -1).clone()
            lane.columns[..., :committed] = part.subset
        if part.earlier_kv is not None:
            cache[..., committed : committed + part.earlier_rows, :] = part.earlier_kv
        if part.tree is None:
            seen = torch.ones(part.new_rows, total, dtype=torch.bool).tril_()
        else:
            seen = part.tree.ancestor_mask()[part.earlier_rows :]
        lane.fill(Contents(committed, part.positions, list(tokens), seen))
        return lane

    def _fixed(self, plan: ForwardPlan, tokens: Seq[int], bucket: int) -> Tensor:
        """Logits, and the hidden states that are wanted, by a step of fixed shape."""
        stores: list[TorchKV] = [part.store for part in plan.parts]
        buffers = [store.reserve(bucket) for store in stores]
        key = StepKey(tuple(buffers), bucket, tuple(sorted(plan.wanted)))
        step = self.graphs.step(key, lambda: self.make_step([buffer.data for buffer in buffers], bucket))
        contents, rows = [], []
        for index, (store, part) in enumerate(zip(stores, plan.parts, strict=True)):
            assert part.tree is not None
            mine = list(tokens[part.start : part.stop])
            contents.append(Contents(store.length, part.positions, mine, part.tree.ancestor_mask()))
            rows.append(slice(index * bucket, index * bucket + part.new_rows))
        step.inputs.fill(contents)
        highest = max(max(part.positions) for part in plan.parts)
        step.turns.copy_(self._rotary.rows(step.inputs.positions, highest))
        logits, *states = self.graphs.run(step, lambda: self.forward(step, key.wanted), rows)
        plan.hidden_states.update(zip(key.wanted, states, strict=True))
        for store, part, buffer in zip(stores, plan.parts, buffers, strict=True):
            part.side_kv = buffer.data[..., store.length : store.length + part.new_rows, :].clone()
        return logits

    def make_step(self, caches: list[Tensor], bucket: int) -> Step:
        """A step over K/V buffers, (layers, 2, kv_heads, capacity, head_size) each, with ``bucket`` rows for each."""
        inputs = FixedLanes(caches, bucket)
        return Step(inputs, torch.zeros_like(self._rotary.rows(inputs.positions, 0)))

    def forward(self, step: Step, wanted: tuple[int, ...]) -> tuple[Tensor, ...]:
        """What is captured: it reads and writes the step's tensors, the K/V buffers and the weights, nothing else.

        Logits, and the hidden states entering the ``wanted`` layers.
        """
        plan = ForwardPlan([], stop=self.num_layers, wanted=frozenset(wanted))
        hidden = self.decoder.run(plan, self.decoder.embed(step.inputs.tokens), step.inputs.lanes, step.turns)
        return self.decoder.logits(hidden), *(plan.hidden_states[layer] for layer in wanted)


def _is_plain(plan: ForwardPlan, layers: int) -> bool:
    """A full forward over trees, from their tokens, of which nothing but logits, hidden states and K/V is wanted."""
    trees = all(part.tree is not None and part.earlier_kv is None and part.subset is None for part in plan.parts)
    full = plan.start == 0 and plan.stop == layers and not plan.skip_attention and not plan.skip_mlp
    return trees and full and plan.states is None and plan.entry_inputs is None

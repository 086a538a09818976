"""GraphTarget: the fast target on CUDA, for the architectures that :mod:`outpace.targets.dense.architectures` knows.

Plain PyTorch. A full forward over one tree has static shapes: its rows are padded to a bucket, its K/V lies in a buffer
that stays where it is, and from the second use on it is one CUDA graph. Other forwards (batches, hidden states,
sub-graphs, prefill) run eagerly. **Not yet run on a GPU**: tests run it on the CPU with a stand-in for the capture.

Numerics: those of transformers, in the weights' precision; norms and softmax are computed in float32. How many rows a
forward has decides how matrix products round, as in every library: in float32 the difference is about 1e-5 of the
logits' size, in 16 bits near-ties of the top two logits may fall the other way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

import torch
from torch import Tensor

from outpace.targets.base import HiddenStateChunk, Sequence, Target
from outpace.targets.dense.decoder_spec import DecoderSpec
from outpace.targets.dense.graphs import BUCKETS, LIMIT, Capture, Graphs, Step, cuda_capture
from outpace.targets.dense.lanes import Lane
from outpace.targets.dense.torch_kv import Buffer, Pool, TorchKV
from outpace.targets.dense.torch_layers import TorchDecoder
from outpace.targets.forward_plan import ForwardPlan, SequenceRows
from outpace.targets.rotary import RotaryTable
from outpace.targets.row_target import PREFILL_CHUNK, RowTarget
from outpace.targets.threads import torch_at_work

_EXTENT = 64  # attention of an eager forward reads whole multiples of this many slots: kernels want aligned masks


class GraphTarget(RowTarget):
    """A target on the spec's weights, on their device and in their precision unless ``dtype`` says otherwise.

    Weights are partly copied and partly shared with the model (see TorchDecoder): a model must not be changed
    afterwards. ``buckets``: row counts that trees are padded to; ``graphs``: how many are kept; ``capture`` stands in
    for CUDA's in tests; ``embeddings_of``: the target whose embeddings layer 0 reads beside its rows, in specs where it
    does. ``counts`` says how forwards ran.
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
        if capture is None and self.device.type == "cuda":
            capture = cuda_capture
        self.graphs = Graphs(capture, graphs)
        self.pool = Pool((self.num_layers, 2, spec.kv_heads), spec.head_size, like, self.graphs.forget)
        self.counts = self.graphs.counts

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a forward with logits reads."""
        return self.decoder.bytes

    def open(self) -> TorchKV:
        return TorchKV(self.pool)

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

    def prefill(
        self, sequences: Seq[Sequence], aux_hidden_state_layers: Seq[int] = (), on_chunk: HiddenStateChunk | None = None
    ) -> None:
        for one in sequences:  # once for the whole prompt, so that no chunk has to move what is there
            one.kv.reserve(len(one.tokens) - one.kv.length)
        super().prefill(sequences, aux_hidden_state_layers, on_chunk)

    @torch_at_work()
    def run(
        self, plan: ForwardPlan, tokens: Seq[int], *, logits: bool, embeddings: Mapping[int, Tensor] | None = None
    ) -> Tensor | None:
        bucket = next((size for size in self._buckets if size >= len(tokens)), None)
        if bucket is not None and logits and not embeddings and _is_plain(plan, self.num_layers):
            return self._fixed(plan.parts[0], tokens, bucket)
        self.counts.eager += 1
        parts = [part for part in plan.parts if part.new_rows]  # an earlier pass may have run all there is
        lanes = [self._lane(part, tokens[part.start : part.stop]) for part in parts]
        positions = [at for part in parts for at in part.positions[part.earlier_rows :]]
        turns = self._rotary.rows(torch.tensor(positions, device=self.device), max(positions, default=0))
        second = None if plan.second is None else self._second(plan.second)
        hidden = self.decoder.run(plan, self._states(plan, tokens, embeddings), lanes, turns, second)
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
            hidden[row] = embedding.to(hidden)
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
        lane.fill(committed, part.positions, list(tokens), seen)
        return lane

    def _fixed(self, part: SequenceRows, tokens: Seq[int], bucket: int) -> Tensor:
        """One tree's logits by a step of fixed shape."""
        assert part.tree is not None
        store: TorchKV = part.store
        buffer = store.reserve(bucket)
        step = self.graphs.step(buffer, bucket, lambda: self._step(buffer, bucket))
        step.lane.fill(store.length, part.positions, list(tokens), part.tree.ancestor_mask())
        step.turns.copy_(self._rotary.rows(step.lane.positions, max(part.positions)))
        logits = self.graphs.run(step, lambda: self._forward(step), len(tokens))
        part.side_kv = buffer.data[..., store.length : store.length + len(tokens), :].clone()
        return logits

    def _step(self, buffer: Buffer, bucket: int) -> Step:
        lane = Lane.empty(buffer.data, bucket, bucket)
        return Step(lane, torch.zeros_like(self._rotary.rows(lane.positions, 0)))

    def _forward(self, step: Step) -> Tensor:
        """What is captured: it reads and writes the step's tensors, the K/V buffer and the weights, nothing else."""
        hidden = self.decoder.embed(step.lane.tokens)
        hidden = self.decoder.run(ForwardPlan([], stop=self.num_layers), hidden, [step.lane], step.turns)
        return self.decoder.logits(hidden)


def _is_plain(plan: ForwardPlan, layers: int) -> bool:
    """A full forward over one tree, from its tokens, of which nothing but logits and K/V is wanted."""
    part = plan.parts[0]
    alone = len(plan.parts) == 1 and part.tree is not None and part.earlier_kv is None and part.subset is None
    full = plan.start == 0 and plan.stop == layers and not plan.skip_attention and not plan.skip_mlp
    return alone and full and plan.states is None and not plan.wanted and plan.queries is None

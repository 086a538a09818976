"""TorchDecoder: a DecoderSpec in plain PyTorch, with fused projections and attention that reads K/V in place."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outpace.targets.dense.decoder_spec import DecoderSpec, LayerSpec, Matrix
from outpace.targets.dense.lanes import Lane
from outpace.targets.forward_plan import ForwardPlan
from outpace.targets.rotary import rotate


@dataclass(slots=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight, self.bias)

    @property
    def bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(slots=True)
class _Layer:
    """``norms`` by the names in binding.NORMS; ``turning`` (query and key heads, head_size) is that of both as one."""

    qkv: _Linear
    out: _Linear
    gate_up: _Linear
    down: _Linear
    norms: dict[str, Tensor]
    turning: Tensor | None
    mask: int
    rotation: int


@dataclass(slots=True)
class _View:
    """A lane in this forward: its flat rows, the slots of the new ones, and a mask for each window."""

    rows: slice
    cache: Tensor
    slots: Tensor
    masks: list[Tensor]


class TorchDecoder:
    """The weights on their device, and the forward over rows.

    Query, key and value are copied into one matrix, and so are gate and up; other matrices are the model's own memory
    where their precision is the one that is computed in.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.heads, self.kv_heads, self.head_size = spec.heads, spec.kv_heads, spec.head_size
        self.epsilon, self.scale, self.softcap = spec.epsilon, spec.attention_scale, spec.softcap
        self.final_softcap, self.embedding_scale = spec.final_softcap, spec.embedding_scale
        self.gelu = spec.activation == "gelu_pytorch_tanh"
        self.embedding = spec.embedding.weight.to(dtype)
        self.lm_head = _Linear(self.embedding, None) if spec.lm_head is None else _joined([spec.lm_head], dtype)
        self.final_norm = None if spec.final_norm is None else _fitting(spec.final_norm.weight, dtype)
        self.second_norm = None if spec.second_norm is None else _fitting(spec.second_norm.weight, dtype)
        self.entry = None if spec.entry is None else _joined([spec.entry.matrix], dtype)
        before, after = (None, None) if spec.entry is None else (spec.entry.before, spec.entry.after)
        self.entry_norms = None if before is None else before.weight.view(-1, spec.hidden).to(dtype)
        self.entered_norm = None if after is None else _fitting(after.weight, dtype)
        self.windows = sorted({layer.window for layer in spec.layers})
        self.layers = [self._layer(layer) for layer in spec.layers]

    @property
    def bytes(self) -> int:
        """Of the matrices that a forward with logits reads."""
        layers = [part for layer in self.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(part.bytes for part in [*layers, self.lm_head])

    def _layer(self, layer: LayerSpec) -> _Layer:
        norms = {name: _fitting(norm.weight, self.dtype) for name, norm in layer.norms.items()}
        turning = None
        if "query" in norms:
            turning = torch.cat([norms["query"].expand(self.heads, -1), norms["key"].expand(self.kv_heads, -1)])
        return _Layer(
            qkv=_joined([layer.query, layer.key, layer.value], self.dtype),
            out=_joined([layer.out], self.dtype),
            gate_up=_joined([layer.gate, layer.up], self.dtype),
            down=_joined([layer.down], self.dtype),
            norms=norms,
            turning=turning,
            mask=self.windows.index(layer.window),
            rotation=layer.rotation,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """(n, hidden), as the first layer sees them."""
        rows = functional.embedding(tokens, self.embedding)
        return rows if self.embedding_scale == 1 else rows * self.embedding_scale

    def entered(self, rows: Tensor) -> Tensor:
        """States (n, hidden) that the entry makes of ``rows`` (n, inputs)."""
        assert self.entry is not None
        if self.entry_norms is not None:
            pieces = rows.view(len(rows), *self.entry_norms.shape)
            rows = (_norm(pieces, torch.ones_like(self.entry_norms[0]), self.epsilon) * self.entry_norms).flatten(1)
        return _norm(self.entry(rows), self.entered_norm, self.epsilon)

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm alone."""
        return _norm(hidden, self.final_norm, self.epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head: (n, vocabulary)."""
        logits = self.lm_head(self.normed(hidden))
        return self.final_softcap * torch.tanh(logits / self.final_softcap) if self.final_softcap else logits

    def run(
        self,
        plan: ForwardPlan,
        hidden: Tensor,
        lanes: Seq[Lane],
        turns: Tensor,
        second: Tensor | None = None,
        *,
        read: bool = True,
    ) -> Tensor:
        """The plan's layers over ``hidden``, the rows of all lanes end to end; ``turns`` are their rotations.

        ``second``: embeddings of what layer 0 reads beside them. ``read``: whether anybody reads what is returned;
        else the last layer makes no more than K/V where the plan does not want what leaves it.
        """
        views = self._views(lanes)
        read = read or max(plan.wanted, default=-1) >= plan.stop
        for index, layer in enumerate(self.layers):
            if index in plan.wanted:
                plan.hidden_states[index] = hidden
            if not plan.start <= index < plan.stop:
                continue
            ends = index + 1 == plan.stop and not read
            if index not in plan.skip_attention:
                inputs = _norm(hidden, layer.norms.get("norm1"), self.epsilon)
                if index == 0 and self.second_norm is not None:
                    assert second is not None
                    inputs = torch.cat([_norm(second, self.second_norm, self.epsilon), inputs], dim=-1)
                queries = self._placed(index, layer, inputs, views, turns, plan)
                if ends:
                    break
                hidden = hidden + self._after(self._attention(index, layer, queries, views), layer, "post1")
            if index not in plan.skip_mlp and not ends:
                found = self._mlp(layer, _norm(hidden, layer.norms.get("norm2"), self.epsilon))
                hidden = hidden + self._after(found, layer, "post2")
        if len(self.layers) in plan.wanted:
            plan.hidden_states[len(self.layers)] = self.normed(hidden) if plan.normed else hidden
        return hidden

    def _views(self, lanes: Seq[Lane]) -> list[_View]:
        views, start, groups = [], 0, self.heads // self.kv_heads
        for lane in lanes:
            new = len(lane.seen)
            masks = lane.masks(self.windows, groups, self.dtype)
            views.append(_View(slice(start, start + new), lane.cache, lane.slots()[-new:], masks))
            start += new
        return views

    def _after(self, found: Tensor, layer: _Layer, name: str) -> Tensor:
        """Sandwich norms have one on the way back as well."""
        return _norm(found, layer.norms[name], self.epsilon) if name in layer.norms else found

    def _placed(
        self, index: int, layer: _Layer, rows: Tensor, views: list[_View], turns: Tensor, plan: ForwardPlan
    ) -> Tensor:
        """The rows' queries (n, heads, head_size). Their keys and values are laid where they are kept."""
        heads = layer.qkv(rows).view(len(rows), -1, self.head_size)
        turning, values = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        if layer.turning is not None:
            wide = turning.to(layer.turning.dtype)
            turning = functional.rms_norm(wide, (self.head_size,), eps=self.epsilon) * layer.turning
            turning = turning.to(rows.dtype)
        turning = rotate(turning, turns[layer.rotation])
        queries, keys = turning[:, : self.heads], turning[:, self.heads :]
        if plan.queries is not None:
            plan.queries[index] = queries
        for view in views:
            kept = view.cache[index]
            kept[0].index_copy_(1, view.slots, keys[view.rows].transpose(0, 1))
            kept[1].index_copy_(1, view.slots, values[view.rows].transpose(0, 1))
        return queries

    def _attention(self, index: int, layer: _Layer, queries: Tensor, views: list[_View]) -> Tensor:
        found = []
        for view in views:
            mask = view.masks[layer.mask]
            found.append(self._attend(queries[view.rows], view.cache[index], mask if mask.dim() == 2 else mask[index]))
        return layer.out(found[0] if len(found) == 1 else torch.cat(found))

    def _attend(self, queries: Tensor, kept: Tensor, mask: Tensor) -> Tensor:
        """(n, heads, head_size) over (2, kv_heads, extent, head_size) -> (n, heads * head_size).

        Query heads that share a K/V head become rows of one head: K/V is read where it lies, once.
        """
        rows = len(queries)
        folded = queries.reshape(rows, self.kv_heads, -1, self.head_size).transpose(0, 1).flatten(1, 2)
        if self.softcap:
            logits = torch.matmul(folded, kept[0].transpose(1, 2)) * self.scale
            logits = self.softcap * torch.tanh(logits / self.softcap) + mask
            found = torch.matmul(logits.softmax(-1, dtype=torch.float32).to(kept.dtype), kept[1])
        else:
            found = functional.scaled_dot_product_attention(
                folded[None], kept[:1], kept[1:], attn_mask=mask[None], scale=self.scale
            )[0]
        return found.view(self.kv_heads, rows, -1, self.head_size).transpose(0, 1).reshape(rows, -1)

    def _mlp(self, layer: _Layer, rows: Tensor) -> Tensor:
        gate, up = layer.gate_up(rows).chunk(2, -1)
        active = functional.gelu(gate, approximate="tanh") if self.gelu else functional.silu(gate)
        return layer.down(active * up)


def _norm(rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    if weight is None:
        return rows
    return functional.rms_norm(rows.to(weight.dtype), (rows.shape[-1],), weight, epsilon).to(rows.dtype)


def _fitting(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A norm's weights in ``dtype`` where that holds them exactly (Gemma's are shifted by one), else in float32."""
    narrow = weight.to(dtype)
    return narrow if torch.equal(narrow.float(), weight) else weight


def _joined(parts: list[Matrix], dtype: torch.dtype) -> _Linear:
    """One matrix of all rows, one part below the other."""
    weights = [part.weight.to(dtype) for part in parts]
    weight = weights[0] if len(parts) == 1 else torch.cat(weights)
    if all(part.bias is None for part in parts):
        return _Linear(weight, None)
    biases = [weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.to(dtype) for part in parts]
    return _Linear(weight, torch.cat(biases))

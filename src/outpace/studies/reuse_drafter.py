"""The drafters of ``kvshot``: EAGLE-3's layer, fed with the target's hidden states, with its K/V, or with both.

Fed with states it is EAGLE-3: a row of a token and the state before it sees the rows of earlier tokens, which the
drafter itself made from states. Fed with K/V it sees, in place of those rows, the K/V of one layer of the target, and
begins without a state; fed with both it begins with the states and sees the K/V. For training and diagnosis alone:
nothing decodes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from outpace.core.errors import BadInput
from outpace.heads.base import Batch
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig
from outpace.heads.pruned import plain_theta
from outpace.heads.unrolled import Pair, gathered, spread, unrolled
from outpace.methods.learned.eagle3.network import Eagle3
from outpace.methods.learned.eagle3.unrolling import Unrolling
from outpace.targets.base import Target
from outpace.targets.dense.decoder_spec import DecoderSpec, LayerSpec
from outpace.targets.rotary import angles, rotate, turns

Reuse = Literal["states", "kv", "both"]


@dataclass(frozen=True)
class TargetKeysValues:
    """K/V of one layer of the target, made again from the hidden states that enter it."""

    spec: DecoderSpec
    layer: int
    weights: LayerSpec
    theta: float

    @classmethod
    def of(cls, target: Target, layer: int) -> TargetKeysValues:
        """Raises BadInput for a target whose weights cannot be read, or whose positions are not plain rotary ones."""
        spec = target.decoder_spec()
        theta = 0.0 if spec is None else plain_theta(spec)
        if spec is None or not theta:
            raise BadInput("the K/V of this model cannot be made from its hidden states: choose another model")
        return cls(spec, layer, spec.layers[layer], theta)

    def sized(self, config: HeadConfig) -> HeadConfig:
        """The configuration of a head whose attention fits this K/V."""
        spec = self.spec
        sizes = {"heads": spec.heads, "kv_heads": spec.kv_heads, "head_size": spec.head_size}
        return config.model_copy(update={**sizes, "rope_theta": self.theta})

    @torch.no_grad()
    def __call__(self, states: Tensor, positions: Tensor) -> Pair:
        """Keys and values, (B, kv_heads, T, head_size) each, of ``states`` (B, T, hidden) at ``positions`` (B, T)."""
        spec, layer = self.spec, self.weights
        rows = states.float()
        if "norm1" in layer.norms:
            rows = functional.rms_norm(rows, rows.shape[-1:], layer.norms["norm1"].weight.float(), spec.epsilon)
        made = []
        for matrix in (layer.key, layer.value):
            bias = None if matrix.bias is None else matrix.bias.float()
            found = functional.linear(rows, matrix.rows(), bias)
            made.append(found.view(*found.shape[:-1], spec.kv_heads, spec.head_size).transpose(1, 2))
        keys, values = made
        if "key" in layer.norms:
            keys = functional.rms_norm(keys, keys.shape[-1:], layer.norms["key"].weight.float(), spec.epsilon)
        turned = turns(angles(positions, spec.head_size, self.theta))[:, :, None]
        return rotate(keys, turned).to(states.dtype), values.to(states.dtype)


class ReuseDrafter(Eagle3):
    """EAGLE-3's layer that is fed with ``reuse`` of the target. ``keys_values``: makes the K/V."""

    def __init__(
        self, config: HeadConfig, draft_vocabulary: DraftVocabulary, reuse: Reuse, keys_values: TargetKeysValues
    ) -> None:
        super().__init__(config, draft_vocabulary)
        self.reuse, self.keys_values = reuse, keys_values

    def unrolling(self, batch: Batch, embedding: Tensor) -> Unrolling:
        if self.reuse == "states":
            return super().unrolling(batch, embedding)
        return _OverKeysValues(self, batch, embedding)


class _OverKeysValues(Unrolling):
    """As :class:`Unrolling`, but all steps see the target's K/V up to their row, and a row's own steps."""

    def __init__(self, head: ReuseDrafter, batch: Batch, embedding: Tensor) -> None:
        super().__init__(head, batch, embedding)
        if head.reuse == "kv":
            self._state = torch.zeros_like(self._state)
        self._given = head.keys_values(batch.states[head.keys_values.layer], batch.positions())

    def step(self, wanted: Tensor, tokens: Tensor) -> Tensor:
        head, layer = self._head, self._layer
        attention = layer.self_attn
        chosen = wanted[self.rows].nonzero()[:, 0]
        rows, state = self.rows[chosen], self._state[chosen]
        embedded = self._embedding[tokens[rows]].to(state.dtype)
        read = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], -1)[None]
        where = self._where[rows] + 1 + self._steps  # of the token that is read: the target's K/V end before it
        keys, values = (spread(one, rows, self._shape) for one in attention.keys_values(read, where))
        self._keys_values.append((keys, values))
        queries = spread(attention.queries(read, where), rows, self._shape)
        given = (self._given[0].to(queries.dtype), self._given[1].to(queries.dtype))
        attended = attention.o_proj(gathered(unrolled(queries, given, self._keys_values, self._lengths), rows))
        stream = layer.feed(state + attended)
        found: Tensor = head.norm(stream)
        self.rows, self._state = rows, head.handed_on(stream, found)
        self._steps += 1
        return found

"""The network of EAGLE-3, run step after step over its own outputs from every row of a batch at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outpace.heads.base import Batch
from outpace.heads.unrolled import Pair, gathered, spread, unrolled, widened

if TYPE_CHECKING:
    from outpace.methods.learned.eagle3.network import Eagle3


class Unrolling:
    """Step k of row t reads token t + 1 + k, or what was drafted there, and predicts token t + 2 + k.

    The first step makes keys and values of all rows from the target's states; later ones see them and a row's own.
    ``rows`` (n,) long: those that ran last, in the flattened (B, T) of the batch.
    """

    def __init__(self, head: Eagle3, batch: Batch, embedding: Tensor) -> None:
        """``embedding`` (V, hidden): the target's."""
        self._head, self._embedding = head, embedding
        self._shape, self._lengths = batch.tokens.shape, batch.lengths
        layers = head.config.aux_hidden_state_layers
        self._state = head.fused([batch.states[layer] for layer in layers]).flatten(0, 1)
        self._where = batch.positions().flatten()
        self.rows = torch.arange(len(self._where), device=self._where.device)
        self._steps = 0
        self._keys_values: list[Pair] = []
        self._begins: list[int] = []

    def step(self, wanted: Tensor, tokens: Tensor) -> Tensor:
        """Run one step of those of the last rows that are ``wanted`` (B * T,) bool; later steps run no others.

        ``tokens`` (B * T,) long: what each row reads. Returns what the rows predict from, behind the final norm:
        (n, hidden).
        """
        head, layer = self._head, self._layer
        attention = layer.self_attn
        chosen = wanted[self.rows].nonzero()[:, 0]
        rows, state = self.rows, self._state
        if self._steps:
            rows, state = rows[chosen], state[chosen]
        embedded = self._embedding[tokens[rows]].to(state.dtype)
        normed = layer.hidden_norm(state)
        read = torch.cat([layer.input_layernorm(embedded), normed], -1)[None]
        if head.options.residual == "normed":
            state = normed
        where = self._where[rows] + self._steps
        keys, values = (spread(one, rows, self._shape) for one in attention.keys_values(read, where))
        if not self._steps:
            rows, state, read, where = rows[chosen], state[chosen], read[:, chosen], where[chosen]
            self._begins = _begins(rows, self._shape, self._lengths)
        queries = spread(attention.queries(read, where), rows, self._shape)
        self._keys_values.append(widened((keys, values), queries.shape[1]))
        first, *later = self._keys_values
        attended = attention.o_proj(gathered(unrolled(queries, first, later, self._lengths, self._begins), rows))
        stream = layer.feed(state + attended)
        found: Tensor = head.norm(stream)
        self.rows, self._state = rows, head.handed_on(stream, found)
        self._steps += 1
        return found

    @property
    def state(self) -> Tensor:
        """(n, hidden): what the next step's rows begin with."""
        return self._state

    @property
    def _layer(self) -> Any:
        return self._head.layers[0]


def _begins(rows: Tensor, shape: torch.Size, lengths: list[int] | None) -> list[int]:
    """The first of ``rows`` in each packed conversation, or in any of the batch's; its end where there is none."""
    if lengths is None:
        return [int((rows % shape[1]).min()) if len(rows) else shape[1]]
    found, start = [], 0
    for size in lengths:
        at = int(torch.searchsorted(rows, start))
        first = int(rows[at]) if at < len(rows) else start + size
        found.append(min(first - start, size))
        start += size
    return found

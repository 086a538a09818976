"""LayeredKV: a K/V store with two tensors for every layer, for models that run through transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.targets.kv_store import ROWS_AT_ONCE, KVStore, check_block, rounded_up


class LayeredKV(KVStore):
    """Keys and values by layer, (kv_heads, capacity, head_dim) each."""

    def __init__(self, layers: int) -> None:
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def scratch(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Lay ``keys`` and ``values``, (kv_heads, rows, head_dim), behind the committed rows; return them all."""
        end = self.length + keys.shape[1]
        stored_keys = self._grown(self._keys, layer, end, keys)
        stored_values = self._grown(self._values, layer, end, values)
        stored_keys[:, self.length : end] = keys
        stored_values[:, self.length : end] = values
        return stored_keys[:, :end], stored_values[:, :end]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Committed keys and values at ``positions``, (k,) or (kv_heads, k), copied; None while nothing is stored."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            return None
        if positions.dim() == 1:
            return keys[:, positions], values[:, positions]
        where = positions[..., None]
        return torch.take_along_dim(keys, where, 1), torch.take_along_dim(values, where, 1)

    def keys(self, start: int, stop: int) -> Tensor:
        held = [None if one is None else one[:, start:stop].float() for one in self._keys]
        found = [one for one in held if one is not None]
        if len(found) < len(held) or len({one.shape for one in found}) != 1:
            raise BadInput("the layers of this model keep different K/V: no part of it can be chosen by keys")
        return torch.stack(found)

    def take(self, side_kv: list[tuple[Tensor, Tensor] | None], rows: Sequence[int]) -> None:
        """Commit these rows of a forward's (keys, values) by layer, each (kv_heads, rows, head_dim)."""
        contiguous = list(rows) == list(range(len(rows)))
        for layer, pair in enumerate(side_kv):
            assert pair is not None  # only full forwards are committed
            chosen = slice(0, len(rows)) if contiguous else torch.tensor(rows, device=pair[0].device)
            self.scratch(layer, pair[0][:, chosen], pair[1][:, chosen])
        self.length += len(rows)

    def block(self, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        check_block(start, stop, self.length)
        held = zip(self._keys, self._values, strict=True)
        whole = [(keys, values) for keys, values in held if keys is not None and values is not None]
        return [(keys[:, start:stop].clone(), values[:, start:stop].clone()) for keys, values in whole]

    def append(self, block: list[tuple[Tensor, Tensor] | None], rows: int) -> None:
        check_block(self.length, self.length + rows, self.length + rows)
        self.take(block, range(rows))

    def bytes_with(self, rows: int) -> int:
        total = 0
        for one in (*self._keys, *self._values):
            if one is not None:
                total += one.nbytes // one.shape[1] * self._capacity_with(one.shape[1], self.length + rows)
        return total

    def _copy(self, length: int) -> LayeredKV:
        twin = LayeredKV(len(self._keys))
        twin.length = length
        held = rounded_up(length, ROWS_AT_ONCE)
        twin._keys = [None if one is None else one[:, :held].clone() for one in self._keys]
        twin._values = [None if one is None else one[:, :held].clone() for one in self._values]
        return twin

    def clear(self) -> None:
        self.length = 0
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)

    @staticmethod
    def _capacity_with(capacity: int, rows: int) -> int:
        return capacity if rows <= capacity else rounded_up(max(rows, capacity + capacity // 4), ROWS_AT_ONCE)

    def _grown(self, tensors: list[Tensor | None], layer: int, rows: int, like: Tensor) -> Tensor:
        stored = tensors[layer]
        if stored is not None and stored.shape[1] >= rows:
            return stored
        capacity = self._capacity_with(0 if stored is None else stored.shape[1], rows)
        # Zeros, not garbage: a masked column still enters 0 * value, and 0 * NaN is NaN.
        grown = torch.zeros(like.shape[0], capacity, like.shape[2], dtype=like.dtype, device=like.device)
        if stored is not None:
            grown[:, : self.length] = stored[:, : self.length]
        tensors[layer] = grown
        return grown

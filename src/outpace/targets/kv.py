"""The K/V store of one sequence: committed rows, and slack behind them that a forward may use as scratch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GRANULE = 256


class KVStore:
    """Keys and values of ``length`` committed tokens, per layer (kv_heads, capacity, head_dim).

    Rows at and after ``length`` are scratch: a forward lays its own keys there so that attention reads one
    contiguous block, and nothing ever reads them afterwards. Only :meth:`take` and :meth:`advance` make rows committed.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
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
        """Committed keys and values at ``positions`` (k,), copied; None while nothing is stored."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            return None
        return keys[:, positions], values[:, positions]

    def take(self, side: list[tuple[Tensor, Tensor] | None], rows: Sequence[int]) -> None:
        """Commit these rows of a forward's (keys, values) by layer, each (kv_heads, rows, head_dim)."""
        contiguous = list(rows) == list(range(len(rows)))
        for layer, pair in enumerate(side):
            assert pair is not None  # only full forwards are committed
            chosen = slice(0, len(rows)) if contiguous else torch.tensor(rows, device=pair[0].device)
            self.scratch(layer, pair[0][:, chosen], pair[1][:, chosen])
        self.length += len(rows)

    def advance(self, rows: int) -> None:
        """Commit the first ``rows`` scratch rows of the forward that has just run (a prefill chunk)."""
        self.length += rows

    def fork(self, length: int | None = None) -> KVStore:
        """An independent copy of the first ``length`` rows."""
        twin = KVStore(len(self._keys))
        twin.length = self.length if length is None else length
        if not 0 <= twin.length <= self.length:
            raise ValueError(f"cannot fork {length} of {self.length} committed tokens")
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            if keys is not None and values is not None:
                twin._keys[layer] = keys[:, : _rounded(twin.length)].clone()
                twin._values[layer] = values[:, : _rounded(twin.length)].clone()
        return twin

    def clear(self) -> None:
        """Free the memory."""
        self.length = 0
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)

    def _grown(self, tensors: list[Tensor | None], layer: int, rows: int, like: Tensor) -> Tensor:
        stored = tensors[layer]
        if stored is not None and stored.shape[1] >= rows:
            return stored
        capacity = _rounded(rows if stored is None else max(rows, 2 * stored.shape[1]))
        # Zeros, not garbage: a masked column still enters 0 * value, and 0 * NaN is NaN.
        grown = torch.zeros(like.shape[0], capacity, like.shape[2], dtype=like.dtype, device=like.device)
        if stored is not None:
            grown[:, : self.length] = stored[:, : self.length]
        tensors[layer] = grown
        return grown


def _rounded(rows: int) -> int:
    return -(-rows // _GRANULE) * _GRANULE

"""Which part of a long context to read: the first tokens, the latest ones, and the chunks that a query attends to.

TriForce (Sun et al. 2024, arXiv 2404.11912, section 4.1) cuts the K/V into chunks and keeps, in every layer and head,
those whose mean key has the largest product with the query of the latest token. Query heads that share a K/V head
choose for it together, by the sum of their products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 512
"""Tokens whose keys are copied at a time."""


class Chunks:
    """Mean keys of one text, by chunks of ``size`` tokens, and the chunks that were chosen by them last.

    ``seen``: how many tokens have been taken up, a multiple of ``size``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen = 0
        self.chosen_at = -1
        """How many tokens were committed when chunks were chosen; -1 before."""
        self._means: list[Tensor] = []
        self._chosen: Tensor | None = None
        self._recent = 0

    def grow(self, length: int, keys: Callable[[int, int], Tensor]) -> None:
        """Take up all whole chunks of ``length`` tokens; ``keys(start, stop)`` are (layers, kv_heads, n, width)."""
        most = max(1, _AT_ONCE // self.size)
        while chunks := min(most, (length - self.seen) // self.size):
            stop = self.seen + chunks * self.size
            found = keys(self.seen, stop)
            layers, heads, _, width = found.shape
            self._means.append(found.reshape(layers, heads, chunks, self.size, width).mean(3))
            self.seen = stop

    def products(self, queries: Tensor) -> Tensor:
        """Products of ``queries`` (layers, heads, width) with the mean keys, summed over the query heads of a K/V head:
        (layers, kv_heads, chunks)."""
        import torch

        self._means = [torch.cat(self._means, 2)]
        means = self._means[0]
        layers, heads, _, width = means.shape
        shared = queries.view(layers, heads, -1, width).sum(2)
        return torch.einsum("lhd,lhcd->lhc", shared, means)

    def choose(self, queries: Tensor, length: int, sink: int, window: int, retrieved: int) -> None:
        """Choose whole chunks, at most ``retrieved`` of ``length`` committed tokens, behind the first ``sink`` and
        before the last ``window``. ``queries``: (layers, heads, width)."""
        import torch

        first, last = -(-sink // self.size), min(self.seen, length - window) // self.size
        count = min(retrieved // self.size, last - first)
        self.chosen_at, self._recent, self._chosen = length, length - window, None
        if count > 0:
            products = self.products(queries)[..., first:last]
            best = first + products.topk(count, sorted=False).indices.sort(-1).values
            self._chosen = (best[..., None] * self.size + torch.arange(self.size, device=best.device)).flatten(-2)

    def positions(self, length: int, sink: int) -> Tensor:
        """What to read of ``length`` committed tokens, ascending: the first ``sink``, the chosen chunks, and all from
        the window on that was the latest when they were chosen. (layers, kv_heads, k), or (k,) where none was."""
        import torch

        ends = torch.arange(min(sink, self._recent)), torch.arange(self._recent, length)
        if self._chosen is None:
            return torch.cat(ends)
        chosen = self._chosen.cpu()
        layers, heads, _ = chosen.shape
        return torch.cat([ends[0].expand(layers, heads, -1), chosen, ends[1].expand(layers, heads, -1)], -1)


def streaming(length: int, sink: int, window: int) -> Tensor | None:
    """The first ``sink`` and the last ``window`` of ``length`` positions (Xiao et al. 2024, arXiv 2309.17453), or
    None: all of them."""
    import torch

    if length <= sink + window:
        return None
    return torch.cat([torch.arange(sink), torch.arange(length - window, length)])

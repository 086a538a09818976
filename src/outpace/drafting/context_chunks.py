"""Which part of a long context to read: the first tokens, the latest ones, and the chunks most like the latest ones.

TriForce (Sun et al. 2024, arXiv 2404.11912, section 4.1) cuts the K/V into chunks and keeps those whose mean key has
the largest product with the current query. Queries and keys are internal to a target's kernels and differ in every
layer and head; every target exposes its hidden states, of which both are linear functions (after a norm). So a chunk is
represented here by the mean of its normalised hidden states entering one layer, less the mean of the whole text, and
compared with the latest states by cosine.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Chunks:
    """Hidden states of one text, summed by chunks of ``size`` tokens.

    ``recent``: the factor by which a token's weight in the query fades with each later token.
    """

    def __init__(self, size: int, recent: float = 0.5) -> None:
        self.size = size
        self._recent = recent
        self._sums: Tensor | None = None
        self._counts = torch.zeros(0)
        self._query: Tensor | None = None

    @torch.inference_mode()  # hidden states are inference tensors, and sums of them must be too
    def add(self, position: int, states: Tensor) -> None:
        """States (rows, hidden) of the tokens at ``position``, ``position + 1``, ..."""
        if not len(states):
            return
        states = torch.nn.functional.normalize(states.detach().float().cpu(), dim=-1)
        where = torch.arange(position, position + len(states)) // self.size
        chunks = int(where[-1]) + 1
        if self._sums is None:
            self._sums = states.new_zeros(0, states.shape[1])
        if chunks > len(self._sums):
            more = max(chunks, 2 * len(self._sums)) - len(self._sums)
            self._sums = torch.cat([self._sums, self._sums.new_zeros(more, states.shape[1])])
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more)])
        self._sums.index_add_(0, where, states)
        self._counts.index_add_(0, where, torch.ones(len(states)))
        # The query is an average over recent tokens: one alone is a poor description of the context.
        faded = self._recent ** torch.arange(len(states) - 1, -1, -1, dtype=torch.float32)
        self._query = (
            faded @ states if self._query is None else faded @ states + self._recent ** len(states) * self._query
        )

    def alike(self) -> Tensor:
        """Similarity of every chunk to the latest tokens: cosines, (chunks,); -inf where no state is known."""
        if self._sums is None or self._query is None:
            return torch.zeros(0)
        centre = self._sums.sum(0) / self._counts.sum()
        means = self._sums / self._counts.clamp(min=1.0)[:, None] - centre
        query = self._query / self._query.norm() - centre
        cosines = torch.nn.functional.cosine_similarity(means, query[None], dim=-1)
        return torch.where(self._counts > 0, cosines, -torch.inf)

    def positions(self, length: int, sink: int, window: int, retrieved: int) -> Tensor | None:
        """Which of ``length`` committed positions to read, ascending: the first ``sink``, the last ``window``, and of
        what lies between whole chunks, at most ``retrieved`` tokens, the most alike. None: all of them."""
        if length <= sink + window + retrieved:
            return None
        kept = torch.zeros(length, dtype=torch.bool)
        kept[:sink] = True
        kept[length - window :] = True
        # Chunks that begin behind the sink and end before the window, so that they overlap with neither.
        first, last = -(-sink // self.size), (length - window) // self.size
        alike = self.alike()[first:last]
        count = min(retrieved // self.size, len(alike))
        if count > 0:
            best = alike.topk(count)
            for index in best.indices[best.values > -torch.inf].tolist():
                begin = (first + index) * self.size
                kept[begin : begin + self.size] = True
        return kept.nonzero().flatten()


def streaming(length: int, sink: int, window: int) -> Tensor | None:
    """The first ``sink`` and the last ``window`` of ``length`` positions (Xiao et al. 2024, arXiv 2309.17453), or
    None: all of them."""
    if length <= sink + window:
        return None
    return torch.cat([torch.arange(sink), torch.arange(length - window, length)])

"""Words: which tokens a head can draft, and the matrix that scores them.

A head's LM head is the largest part of its cost. Three forms: the target's own rows of the tokens that its text uses
most (a reduced vocabulary, as EAGLE-3 drafts from: Li et al. 2025, arXiv 2503.01840), borrowed and so neither trained
nor stored; the same rows, trained (``own``); or a low-rank factorisation over the whole vocabulary (SlimSpec, Plaksin
et al. 2026): hidden -> rank -> vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DraftVocabulary(nn.Module):
    """``ids`` (Vd,) long: the target's id of each word. Logits are (..., Vd)."""

    ids: Tensor
    rows: Tensor

    def __init__(self, ids: Tensor, rows: Tensor, *, rank: int = 0, own: bool = False) -> None:
        """``rows`` (Vd, hidden): the target's LM head for these tokens. ``rank`` above 0 factors and trains them."""
        super().__init__()
        self.register_buffer("ids", ids.long())
        self.rank = rank
        if rank:
            down, up = factored(rows, rank)
            self.down, self.up = nn.Parameter(down), nn.Parameter(up)
            self.register_buffer("rows", rows[:0], persistent=False)
        elif own:
            self.rows = nn.Parameter(rows.clone())
        else:
            self.register_buffer("rows", rows, persistent=False)

    @property
    def own(self) -> bool:
        """Whether its matrix is trained, and so stored."""
        return self.rank > 0 or isinstance(self.rows, nn.Parameter)

    def __len__(self) -> int:
        return len(self.ids)

    def forward(self, normed: Tensor) -> Tensor:
        """Logits (..., Vd) of states (..., hidden) behind a norm."""
        return functional.linear(*self.factors(normed))

    def factors(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (..., width) and a matrix (Vd, width) whose product are the logits; narrow where the rank is low."""
        if self.rank:
            return functional.linear(normed, self.down), self.up
        return normed, self.rows

    @property
    def matrix(self) -> Tensor:
        """(Vd, hidden): the whole matrix, multiplied out where it is factored."""
        return self.up @ self.down if self.rank else self.rows

    def places(self, vocab_size: int) -> Tensor:
        """(V,) long: the word of each of the target's tokens, -1 for those that it has not."""
        places = torch.full((vocab_size,), -1, dtype=torch.long, device=self.ids.device)
        places[self.ids] = torch.arange(len(self.ids), device=self.ids.device)
        return places


def factored(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of ``rows`` (n, hidden) of ``rank``: (rank, hidden) and (n, rank), of equal norms."""
    wide = rows.float()
    values, vectors = torch.linalg.eigh(wide.T @ wide)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    scale = values.clamp_min(1e-12).sqrt().sqrt()
    return (vectors * scale).T.contiguous(), (wide @ vectors / scale).contiguous()

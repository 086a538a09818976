"""DraftVocabulary: the tokens that a head can draft, and its LM head over them.

The LM head is the largest part of a head's cost. It has one of three forms:

* borrowed: the target's own LM-head rows of the tokens that its text uses most (the reduced draft vocabulary of
  EAGLE-3, Li et al. 2025, arXiv 2503.01840); neither trained nor stored;
* own: the same rows, trained and stored;
* low rank: hidden -> rank -> vocabulary, a trained factorisation (SlimSpec, Plaksin et al. 2026).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DraftVocabulary(nn.Module):
    """Vd draft tokens. ``d2t`` (Vd,) long: the target's id of each draft token. Logits are (..., Vd)."""

    d2t: Tensor
    rows: Tensor

    def __init__(self, d2t: Tensor, rows: Tensor, *, rank: int = 0, own: bool = False) -> None:
        """``rows`` (Vd, hidden): the target's LM head for these tokens; with ``rank`` above 0 they are factored."""
        super().__init__()
        self.register_buffer("d2t", d2t.long())
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
        """Whether its LM head is trained, and so stored."""
        return self.rank > 0 or isinstance(self.rows, nn.Parameter)

    def __len__(self) -> int:
        return len(self.d2t)

    def forward(self, normed: Tensor) -> Tensor:
        """Logits (..., Vd) of states (..., hidden) behind the final norm."""
        return functional.linear(*self.factors(normed))

    def factors(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (..., width) and a matrix (Vd, width) whose product is the logits; ``width`` is the rank, or hidden."""
        if self.rank:
            return functional.linear(normed, self.down), self.up
        return normed, self.rows

    @property
    def matrix(self) -> Tensor:
        """(Vd, hidden): the whole LM head, multiplied out where it is factored."""
        return self.up @ self.down if self.rank else self.rows

    def t2d(self, vocab_size: int) -> Tensor:
        """(V,) long: the draft token of each of the target's tokens, -1 where there is none."""
        found = torch.full((vocab_size,), -1, dtype=torch.long, device=self.d2t.device)
        found[self.d2t] = torch.arange(len(self.d2t), device=self.d2t.device)
        return found


def factored(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of ``rows`` (n, hidden) of this rank: (rank, hidden) and (n, rank), of equal norms."""
    wide = rows.float()
    values, vectors = torch.linalg.eigh(wide.T @ wide)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    scale = values.clamp_min(1e-12).sqrt().sqrt()
    return (vectors * scale).T.contiguous(), (wide @ vectors / scale).contiguous()


def map_problem(d2t: Tensor, vocab_size: int) -> str | None:
    """What is wrong with token ids (Vd,) as a draft vocabulary of a target of ``vocab_size`` tokens; None: nothing."""
    if not 0 <= int(d2t.min()) <= int(d2t.max()) < vocab_size:
        return "drafts tokens that this model does not have"
    return "has two draft tokens for one of the model's" if len(set(d2t.tolist())) < len(d2t) else None

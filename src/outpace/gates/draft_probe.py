"""A draft model's fingerprint: some of its logits, equal up to rounding in whatever precision it is loaded.

Of drafters only the logits are read, so that draft models of every kind have one: whole models, models of another
vocabulary, and heads that draft as models.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outpace.core.tree import TokenTree
from outpace.targets.base import Target

_TOKENS, _LOGITS = 12, 64
ALIKE = 0.9
"""Cosine above which two probes are of the same weights."""


@torch.inference_mode()
def draft_probe(draft: Target) -> list[float]:
    """Logits of evenly spaced tokens after evenly spaced tokens, centred, as a unit vector."""
    count = min(_TOKENS, draft.vocab_size, draft.context_length - 1)
    tokens = [index * (draft.vocab_size - 1) // max(1, count - 1) for index in range(count)]
    sequence = draft.sequence(tokens)
    with draft.round():
        draft.prefill([sequence])
        row = draft.score([(sequence, TokenTree())])[0].logits[0].float().cpu()
    draft.close(sequence.kv)
    there = row.isfinite()
    row = torch.where(there, row - row[there].mean(), torch.zeros_like(row))  # it may draft part of the vocabulary
    where = there.nonzero()[:, 0] if bool(there.any()) else torch.arange(len(row))
    picked = row[where[torch.linspace(0, len(where) - 1, min(_LOGITS, len(where))).long()]]
    return [round(value, 5) for value in (picked / picked.norm().clamp_min(1e-12)).tolist()]


def alike(one: Seq[float], other: Seq[float]) -> bool:
    """Whether two probes are of the same weights."""
    if len(one) != len(other):
        return False
    return list(one) == list(other) or float(torch.tensor(list(one)) @ torch.tensor(list(other))) >= ALIKE

"""Losses between the target's distributions and a drafter's logits, of which heads compose their own.

Forward KL has a backward pass of its own (:mod:`outpace.heads.row_losses`). The other divergences are those of
DistillSpec (Zhou et al. 2024, arXiv 2310.08461, section 4).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.row_losses import ROWS, row_losses

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(n, V) logits of the target and of the drafter to (n,)."""


def forward_kl(target: Tensor, draft: Tensor) -> Tensor:
    """KL(p || q) plus p's entropy, which no drafter can change: cross entropy with soft labels. (n,)"""
    return -(target.float().softmax(-1) * draft.float().log_softmax(-1)).sum(-1)


def reverse_kl(target: Tensor, draft: Tensor) -> Tensor:
    """KL(q || p): punishes probability of the drafter where the target has none. (n,)"""
    q = draft.float().log_softmax(-1)
    return (q.exp() * (q - target.float().log_softmax(-1))).sum(-1)


def jensen_shannon(target: Tensor, draft: Tensor) -> Tensor:
    """The mean of the KLs of p and q to their mixture; symmetric and bounded by log 2. (n,)"""
    p, q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    mixture = torch.logaddexp(p, q) - 0.6931471805599453
    return 0.5 * ((p.exp() * (p - mixture)).sum(-1) + (q.exp() * (q - mixture)).sum(-1))


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """1 - sum(min(p, q)): the probability that rejection sampling rejects a draft token. (n,)"""
    return 0.5 * (target.float().softmax(-1) - draft.float().softmax(-1)).abs().sum(-1)


DIVERGENCES: dict[str, Divergence] = {
    "fkl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
}
"""Divergences that a drafter may be distilled by (DistillSpec: Zhou et al. 2024, arXiv 2310.08461, section 4)."""
_LEAST = 1e-9


class TeacherTargets:
    """The target's distributions at n positions, over a head's draft vocabulary.

    ``p`` (n, Vd) bfloat16; ``best`` (n,) long: the likeliest draft token. Computed once, and read by every step of an
    unrolled drafter.
    """

    def __init__(self, normed: Tensor, rows: Tensor) -> None:
        """``normed`` (n, hidden): states behind the final norm; ``rows`` (Vd, hidden): the LM head."""
        self.p = torch.empty(len(normed), len(rows), dtype=torch.bfloat16, device=normed.device)
        self.best = torch.empty(len(normed), dtype=torch.long, device=normed.device)
        with torch.no_grad():
            for start in range(0, len(normed), ROWS):
                logits = functional.linear(normed[start : start + ROWS].to(rows.dtype), rows)
                self.best[start : start + ROWS] = logits.argmax(-1)
                self.p[start : start + ROWS] = logits.float().softmax(-1)


def soft_cross_entropy(
    states: Tensor, rows: Tensor | DraftVocabulary, targets: TeacherTargets, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of ``states @ rows.T`` with the target's distributions at ``places``, and agreement.

    Forward KL up to the target's entropy. ``states`` (n, hidden) behind the drafter's norm; ``rows``: the LM head (Vd,
    hidden), or the draft vocabulary, which is faster where its rank is low; ``places`` (n,) long: rows of ``targets``.
    Both results are scalars; agreement is the share of rows with the same likeliest token.
    """
    mean, hits = weighted_cross_entropy(states, rows, targets, places, torch.ones(len(states), device=states.device))
    return mean, hits.float().mean() if len(hits) else states.new_zeros(())


def weighted_cross_entropy(
    states: Tensor, rows: Tensor | DraftVocabulary, targets: TeacherTargets, places: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`soft_cross_entropy`, a mean by ``weights`` (n,), and (n,) bool: the same likeliest token."""
    if not len(states):
        return states.sum() * 0.0, torch.zeros(0, dtype=torch.bool, device=states.device)
    found = row_losses(states, rows, targets.p, targets.best, torch.full_like(places, -1), places=places)
    shares = (weights / weights.sum().clamp_min(_LEAST)).float()
    return found.losses @ shares, found.agreed


def soft_divergence(
    name: str, states: Tensor, rows: Tensor | DraftVocabulary, targets: TeacherTargets, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean divergence ``name`` (one of DIVERGENCES) of ``states @ rows.T`` to the target's distributions at ``places``.

    And agreement; arguments as :func:`soft_cross_entropy`'s, which is faster for forward KL.
    """
    if not len(states):
        return states.sum() * 0.0, states.new_zeros(())
    if isinstance(rows, DraftVocabulary):
        states, rows = rows.factors(states)
    narrow = rows.to(states.dtype)
    with torch.no_grad():
        best = torch.cat([functional.linear(part, narrow).argmax(-1) for part in torch.split(states, ROWS)])
    return _divergences(name, states, narrow, targets, places).mean(), (best == targets.best[places]).float().mean()


def _divergences(name: str, states: Tensor, rows: Tensor, targets: TeacherTargets, places: Tensor) -> Tensor:
    """(n,). Logits are held for ROWS rows at a time, and are computed again in the backward pass."""
    divergence = DIVERGENCES[name]

    def some(part: Tensor, matrix: Tensor, labels: Tensor) -> Tensor:
        # Smaller probabilities count as _LEAST: reverse KL would be infinite.
        return divergence(labels.float().clamp_min(_LEAST).log(), functional.linear(part, matrix))

    parts = zip(torch.split(states, ROWS), torch.split(places, ROWS), strict=True)
    return torch.cat([checkpoint(some, part, rows, targets.p[where], use_reentrant=False) for part, where in parts])

"""Losses between what the target says and what a drafter says, as parts that heads put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from outpace.heads.draft_vocabulary import DraftVocabulary

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(n, V) logits of the target and of the drafter to (n,)."""


def forward_kl(target: Tensor, draft: Tensor) -> Tensor:
    """KL(p || q), up to p's entropy which no drafter can change: cross entropy with soft labels. (n,)"""
    return -(target.float().softmax(-1) * draft.float().log_softmax(-1)).sum(-1)


def reverse_kl(target: Tensor, draft: Tensor) -> Tensor:
    """KL(q || p): the drafter is punished for what the target would not say. (n,)"""
    q = draft.float().log_softmax(-1)
    return (q.exp() * (q - target.float().log_softmax(-1))).sum(-1)


def jensen_shannon(target: Tensor, draft: Tensor) -> Tensor:
    """The mean of both KLs to the mixture; symmetric and bounded by log 2. (n,)"""
    p, q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    mixture = torch.logaddexp(p, q) - 0.6931471805599453
    return 0.5 * ((p.exp() * (p - mixture)).sum(-1) + (q.exp() * (q - mixture)).sum(-1))


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """1 - sum(min(p, q)): the very probability that rejection sampling rejects a draft token. (n,)"""
    return 0.5 * (target.float().softmax(-1) - draft.float().softmax(-1)).abs().sum(-1)


DIVERGENCES: dict[str, Divergence] = {
    "fkl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
}
"""Divergences that a drafter may be distilled by (DistillSpec: Zhou et al. 2024, arXiv 2310.08461, section 4)."""
ROWS = 512
"""Rows whose logits are held at once."""
_LEAST = 1e-9


class TeacherTargets:
    """What the target says at n places, over the words of a head: ``p`` (n, Vd) bfloat16, ``best`` (n,) long.

    Computed once, and looked up by every step of an unrolled drafter.
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


class _SoftCrossEntropy(torch.autograd.Function):
    """Weighted forward KL straight from states: logits live some hundred rows at a time, and so do their gradients.

    ``weights`` (n,): of each row in the sum. Gives the sum, and (n,) bool where both would say the same word.
    Of a vocabulary of thousands, logits and their gradients are by far the largest tensors of a training step.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, p: Tensor, best: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=states.device)
        hits = torch.empty(len(states), dtype=torch.bool, device=states.device)
        to_states = torch.empty_like(states)
        to_rows = torch.zeros_like(rows, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(states), ROWS):
            some, labels = states[start : start + ROWS], p[start : start + ROWS]
            narrow = functional.linear(some, rows)
            # Asked this way because argmax is slow on CPUs, and the maximum is not.
            said = narrow.gather(-1, best[start : start + ROWS, None])[:, 0]
            hits[start : start + ROWS] = said >= narrow.amax(-1)
            q = narrow.float().log_softmax(-1)
            share = weights[start : start + ROWS, None]
            total -= (q * labels).sum(-1) @ share[:, 0]
            # Labels are rounded, and so do not sum to one exactly.
            slope = q.exp_().mul_(labels.sum(-1, keepdim=True, dtype=torch.float32)).sub_(labels)
            slope = slope.mul_(share).to(rows.dtype)
            to_states[start : start + ROWS] = slope @ rows
            if to_rows is not None:
                to_rows += slope.T @ some
        ctx.save_for_backward(to_states, *([] if to_rows is None else [to_rows]))
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        dtype = ctx.saved_tensors[0].dtype
        found = [(one.float() * slopes[0]).to(dtype) for one in ctx.saved_tensors]
        return found[0], found[1] if len(found) > 1 else None, None, None, None


def soft_cross_entropy(
    states: Tensor, rows: Tensor | DraftVocabulary, said: TeacherTargets, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean forward KL of ``states @ rows.T`` to what was said at ``places``, and agreement. Up to the target's entropy.

    ``states`` (n, hidden) behind the drafter's norm; ``rows`` (Vd, hidden), borrowed or trained, or the head's words,
    which are quicker where their rank is low; ``places`` (n,) indices into ``said``. Both results are scalars.
    """
    mean, hits = weighted_cross_entropy(states, rows, said, places, torch.ones(len(states), device=states.device))
    return mean, hits.float().mean() if len(hits) else states.new_zeros(())


def weighted_cross_entropy(
    states: Tensor, rows: Tensor | DraftVocabulary, said: TeacherTargets, places: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`soft_cross_entropy`, a mean by ``weights`` (n,), and (n,) bool: where both would say the same word."""
    if not len(states):
        return states.sum() * 0.0, torch.zeros(0, dtype=torch.bool, device=states.device)
    if isinstance(rows, DraftVocabulary):
        states, rows = rows.factors(states)
    shares = (weights / weights.sum().clamp_min(_LEAST)).float()
    found: tuple[Tensor, Tensor] = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, rows.to(states.dtype), said.p[places], said.best[places], shares
    )
    return found


def soft_divergence(
    name: str, states: Tensor, rows: Tensor | DraftVocabulary, said: TeacherTargets, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean divergence of ``states @ rows.T`` to what was said at ``places``, and agreement: scalars.

    ``name``: one of DIVERGENCES. :func:`soft_cross_entropy` is quicker where it will do.
    """
    if not len(states):
        return states.sum() * 0.0, states.new_zeros(())
    if isinstance(rows, DraftVocabulary):
        states, rows = rows.factors(states)
    narrow = rows.to(states.dtype)
    with torch.no_grad():
        best = torch.cat([functional.linear(part, narrow).argmax(-1) for part in torch.split(states, ROWS)])
    return _divergences(name, states, narrow, said, places).mean(), (best == said.best[places]).float().mean()


def _divergences(name: str, states: Tensor, rows: Tensor, said: TeacherTargets, places: Tensor) -> Tensor:
    """(n,). Logits live a few hundred rows at a time, and are computed again on the way back."""
    divergence = DIVERGENCES[name]

    def some(part: Tensor, matrix: Tensor, labels: Tensor) -> Tensor:
        # Shares below are as good as none, and KL the other way would be infinite.
        return divergence(labels.float().clamp_min(_LEAST).log(), functional.linear(part, matrix))

    parts = zip(torch.split(states, ROWS), torch.split(places, ROWS), strict=True)
    return torch.cat([checkpoint(some, part, rows, said.p[where], use_reentrant=False) for part, where in parts])

"""Losses between what the target says and what a drafter says, as parts that heads put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from outpace.heads.words import Words

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


class Said:
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
    """Mean forward KL straight from states: logits live a few hundred rows at a time, backward's work is done at once.

    Of a vocabulary of thousands, logits and their gradients are by far the largest tensors of a training step.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, p: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=states.device)
        hits = torch.zeros((), device=states.device)
        to_states = torch.empty_like(states)
        to_rows = torch.zeros_like(rows, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(states), ROWS):
            some, labels = states[start : start + ROWS], p[start : start + ROWS]
            narrow = functional.linear(some, rows)
            # Asked this way because argmax is slow on CPUs, and the maximum is not.
            said = narrow.gather(-1, best[start : start + ROWS, None])[:, 0]
            hits += (said >= narrow.amax(-1)).sum()
            q = narrow.float().log_softmax(-1)
            total -= (q * labels).sum()
            # Labels are rounded, and so do not sum to one exactly.
            slope = q.exp_().mul_(labels.sum(-1, keepdim=True, dtype=torch.float32)).sub_(labels).to(rows.dtype)
            to_states[start : start + ROWS] = slope @ rows
            if to_rows is not None:
                to_rows += slope.T @ some
        ctx.save_for_backward(to_states, *([] if to_rows is None else [to_rows]))
        hits /= len(states)
        ctx.mark_non_differentiable(hits)
        return total / len(states), hits

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        to_states = ctx.saved_tensors[0]
        weight = slopes[0] / len(to_states)
        found = [(one.float() * weight).to(to_states.dtype) for one in ctx.saved_tensors]
        return found[0], found[1] if len(found) > 1 else None, None, None


def soft_cross_entropy(states: Tensor, rows: Tensor | Words, said: Said, places: Tensor) -> tuple[Tensor, Tensor]:
    """Mean forward KL of ``states @ rows.T`` to what was said at ``places``, and agreement. Up to the target's entropy.

    ``states`` (n, hidden) behind the drafter's norm; ``rows`` (Vd, hidden), borrowed or trained, or the head's words,
    which are quicker where their rank is low; ``places`` (n,) indices into ``said``. Both results are scalars.
    """
    if not len(states):
        return states.sum() * 0.0, states.new_zeros(())
    if isinstance(rows, Words):
        states, rows = rows.factors(states)
    mean, hits = _SoftCrossEntropy.apply(states, rows.to(states.dtype), said.p[places], said.best[places])  # type: ignore[no-untyped-call]
    return mean, hits


def soft_divergence(
    name: str, states: Tensor, rows: Tensor, said: Said, places: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean divergence of ``states @ rows.T`` to what was said at ``places``, and agreement: scalars.

    ``name``: one of DIVERGENCES; ``weights`` (n,): of the mean, all alike by default. Logits live a few hundred rows at
    a time and are computed again on the way back; :func:`soft_cross_entropy` is quicker where it will do.
    """
    if not len(states):
        return states.sum() * 0.0, states.new_zeros(())
    divergence, narrow = DIVERGENCES[name], rows.to(states.dtype)

    def some(part: Tensor, matrix: Tensor, labels: Tensor) -> Tensor:
        # Shares below are as good as none, and KL the other way would be infinite.
        return divergence(labels.float().clamp_min(_LEAST).log(), functional.linear(part, matrix))

    losses, hits = [], []
    for part, where in zip(torch.split(states, ROWS), torch.split(places, ROWS), strict=True):
        losses.append(checkpoint(some, part, narrow, said.p[where], use_reentrant=False))
        with torch.no_grad():
            hits.append(functional.linear(part, narrow).argmax(-1) == said.best[where])
    found = torch.cat(losses)
    mean = found.mean() if weights is None else (weights * found).sum() / weights.sum().clamp_min(_LEAST)
    return mean, torch.cat(hits).float().mean()


def over(mask: Tensor, values: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` holds, 0 where it holds nowhere."""
    weights = mask.to(values.dtype)
    return (values * weights).sum() / weights.sum().clamp_min(1.0)


def agreement(mask: Tensor, target: Tensor, draft: Tensor) -> Tensor:
    """Share of rows where both would say the same word: (n, V) each, ``mask`` (n,)."""
    return over(mask, (target.argmax(-1) == draft.argmax(-1)).float()).detach()


def hard(labels: Tensor, draft: Tensor) -> Tensor:
    """Cross entropy with labels (n,), which are -1 where there is none: (n,), 0 there."""
    return functional.cross_entropy(draft.float(), labels, ignore_index=-1, reduction="none")

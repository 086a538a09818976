"""Losses of single rows between the target's distribution and a drafter's, with a backward pass of their own.

The logits over a vocabulary and their gradients would be the largest tensors of a training step. Here they are made for
some rows at a time, and of each row only its loss and the gradient of its state are kept; the weights of rows may be
chosen after the losses are known.

``ce``: cross entropy with soft labels, forward KL up to the target's entropy. ``tv``: total variation at temperature 1,
the probability that rejection sampling rejects a draft token. ``lk``: the hybrid of LK losses (Samarin et al. 2026,
arXiv 2602.23881), w KL + (1 - w) TV with w = exp(-eta * a), where a = 1 - TV is the row's acceptance, and w is taken as
given: KL teaches rows that are still rarely accepted, and the others are trained for acceptance itself.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outpace.heads.draft_vocabulary import DraftVocabulary

Form = Literal["ce", "tv", "lk"]
ROWS = 128
"""Rows whose logits are held at once: few enough that passes over them find them in a cache."""
ETA = 3.0
"""How fast ``lk`` turns from KL to TV as a row's acceptance rises: the paper's best."""
_LEAST = 1e-9


class RowLosses(NamedTuple):
    """``losses`` (n,) float32, differentiable. ``agreed`` (n,) bool: target and drafter have the same likeliest token.

    ``right`` (n,) bool: the drafter's likeliest token is the label.
    """

    losses: Tensor
    agreed: Tensor
    right: Tensor


class _RowLosses(torch.autograd.Function):
    """``states`` (n, hidden), ``rows`` (Vd, hidden), ``p`` (m, Vd) and ``best`` (m,), of which row i has ``places[i]``.

    ``labels`` (n,), -1: none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        rows: Tensor,
        p: Tensor,
        best: Tensor,
        places: Tensor,
        labels: Tensor,
        form: Form,
        eta: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = torch.empty(len(states), device=states.device)
        agreed = torch.empty(len(states), dtype=torch.bool, device=states.device)
        right = torch.empty_like(agreed)
        slopes = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        for start in range(0, len(states), ROWS):
            some = slice(start, start + ROWS)
            narrow = functional.linear(states[some], rows)
            # Compared this way because argmax is slow on CPUs, and the maximum is not.
            most = narrow.amax(-1)
            agreed[some] = narrow.gather(-1, best[places[some], None])[:, 0] >= most
            right[some] = (narrow.gather(-1, labels[some, None].clamp_min(0))[:, 0] >= most) & (labels[some] >= 0)
            losses[some], slope = losses_and_slopes(narrow, p[places[some]], form, eta)
            if slopes is not None:
                slopes[some] = slope.to(rows.dtype) @ rows
        ctx.form, ctx.eta = form, eta
        ctx.save_for_backward(slopes, *([states, rows, p, places] if ctx.needs_input_grad[1] else []))
        ctx.mark_non_differentiable(agreed, right)
        return losses, agreed, right

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        slopes, *more = ctx.saved_tensors
        weights = given[0]
        to_states = None if slopes is None else (slopes.float() * weights[:, None]).to(slopes.dtype)
        to_rows = None
        if more:  # the logits again: the slopes of all of them would be kept otherwise
            states, rows, p, places = more
            to_rows = torch.zeros_like(rows, dtype=torch.float32)
            for start in range(0, len(states), ROWS):
                some = slice(start, start + ROWS)
                logits = functional.linear(states[some], rows)
                _, slope = losses_and_slopes(logits, p[places[some]], ctx.form, ctx.eta)
                to_rows += (slope * weights[some, None]).to(states.dtype).T @ states[some]
            to_rows = to_rows.to(rows.dtype)
        return to_states, to_rows, None, None, None, None, None, None


def losses_and_slopes(logits: Tensor, p: Tensor, form: Form, eta: float = ETA) -> tuple[Tensor, Tensor]:
    """The loss (n,) of each row of ``logits`` (n, Vd) against ``p`` (n, Vd), and its derivative by them, in float32."""
    log_q = logits.float().log_softmax(-1)
    if form == "ce":
        losses = -(log_q * p).sum(-1)
        # Labels are rounded to bfloat16, and so do not sum to one exactly.
        return losses, log_q.exp_().mul_(p.sum(-1, keepdim=True, dtype=torch.float32)).sub_(p)
    p = p.float()
    q = log_q.exp()
    acceptance = torch.minimum(p, q).sum(-1)
    rising = torch.where(q < p, q, 0.0)  # where more probability means more acceptance
    slopes = q * rising.sum(-1, keepdim=True) - rising
    if form == "tv":
        return 1.0 - acceptance, slopes
    share = torch.exp(-eta * acceptance)[:, None]
    divergence = (p * (p.clamp_min(_LEAST).log() - log_q)).sum(-1)
    losses = share[:, 0] * divergence + (1.0 - share[:, 0]) * (1.0 - acceptance)
    return losses, share * (q * p.sum(-1, keepdim=True) - p) + (1.0 - share) * slopes


def row_losses(
    states: Tensor,
    rows: Tensor | DraftVocabulary,
    p: Tensor,
    best: Tensor,
    labels: Tensor,
    *,
    places: Tensor | None = None,
    form: Form = "ce",
    eta: float = ETA,
) -> RowLosses:
    """The loss of every row of ``states`` (n, hidden), which stand behind the drafter's norm.

    ``rows``: the LM head (Vd, hidden), or the draft vocabulary, which is faster where its rank is low; ``p`` (n, Vd)
    and ``best`` (n,): the target's distributions and their likeliest tokens; ``labels`` (n,) long: draft tokens that
    ``right`` is about, -1 for none. ``places`` (n,) long: where in ``p`` and ``best``, which may be longer, each row's
    are; None: in its own place.
    """
    if not len(states):
        none = torch.zeros(0, dtype=torch.bool, device=states.device)
        return RowLosses(states.sum(-1).float(), none, none)
    if isinstance(rows, DraftVocabulary):
        states, rows = rows.factors(states)
    if places is None:
        places = torch.arange(len(states), device=states.device)
    given = (states, rows.to(states.dtype), p, best, places, labels, form, eta)
    found = _RowLosses.apply(*given)  # type: ignore[no-untyped-call]
    return RowLosses(*found)

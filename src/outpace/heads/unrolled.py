"""Attention of a drafter that training unrolls over its own outputs ("training-time test", EAGLE-3).

In step k the row at position t sees the first step's rows up to t, which were made from the target's states, and its
own rows of the steps since. Taken as one softmax over all T + k columns this would cost a (T, T) matrix per head and
step. Here the causal part is a flash kernel's, whose sums are then joined with the few other columns; and its backward
pass is the same kernel's again, given the joint result and the joint sum: the derivative of a column of a softmax
depends on the other columns through these two alone.

Rows of a prompt ask nothing, and are only seen: the rows behind them see the prompt whole, and themselves causally.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


def widened(pair: Pair, heads: int) -> Pair:
    """Keys and values (B, kv_heads, T, head_size) with ``heads`` heads, each as often as queries share it."""
    groups = heads // pair[0].shape[1]
    if groups == 1:
        return pair
    return pair[0].repeat_interleave(groups, 1), pair[1].repeat_interleave(groups, 1)


def unrolled(
    queries: Tensor, first: Pair, later: Seq[Pair], lengths: Seq[int] | None = None, begins: Seq[int] | None = None
) -> Tensor:
    """What attention finds, (B, heads, T, head_size), of ``queries`` of that shape.

    ``first`` and each of ``later``: (B, kv_heads, T, head_size); a step's own columns are the last of ``later``.
    ``lengths``: of conversations that are packed end to end, each of which sees itself alone; they sum to T.
    ``begins``: for each of them, or one number without ``lengths``, the first row that asks for anything; what rows
    before it get is zero.
    """
    if lengths is not None:
        every = (queries, *first, *(one for pair in later for one in pair))
        alone = zip(*(torch.split(one, list(lengths), 2) for one in every), strict=True)
        parts = []
        for (own, keys, values, *more), begin in zip(alone, begins or [0] * len(lengths), strict=True):
            pairs = list(zip(more[::2], more[1::2], strict=True))
            parts.append(unrolled(own, (keys, values), pairs, begins=[begin]))
        return torch.cat(parts, 2)
    wide = [one for pair in (first, *later) for one in widened(pair, queries.shape[1])]
    if queries.device.type == "cpu":
        found: Tensor = _Joint.apply(begins[0] if begins else 0, queries, *wide)  # type: ignore[no-untyped-call]
        return found
    return plainly(queries, wide)


def plainly(queries: Tensor, wide: Seq[Tensor]) -> Tensor:
    """The same, written out: ``wide`` are keys, values, keys, values, ... with as many heads as queries."""
    count, scale = queries.shape[2], queries.shape[3] ** -0.5
    causal = torch.ones(count, count, dtype=torch.bool, device=queries.device).tril()
    logits = (queries @ wide[0].transpose(2, 3)).masked_fill(~causal, float("-inf"))
    own = [(queries * keys).sum(-1, keepdim=True) for keys in wide[2::2]]
    shares = (scale * torch.cat([logits, *own], -1)).float().softmax(-1).to(queries.dtype)
    mixed: Tensor = shares[..., :count] @ wide[1]
    for index, values in enumerate(wide[3::2]):
        mixed = mixed + shares[..., count + index, None] * values
    return mixed


def spread(rows: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Rows (1, heads, n, head_size) at ``places`` (n) of a (B, T) grid: (B, heads, T, head_size), zero elsewhere."""
    heads, size = rows.shape[1], rows.shape[3]
    flat = rows[0].transpose(0, 1)
    grid: Tensor = flat.new_zeros(shape.numel(), heads, size).index_copy(0, places, flat)
    return grid.view(shape[0], shape[1], heads, size).transpose(1, 2)


def gathered(grid: Tensor, places: Tensor) -> Tensor:
    """The rows at ``places`` (n) of (B, heads, T, head_size): (n, heads * head_size)."""
    return grid.transpose(1, 2).flatten(0, 1)[places].flatten(1)


def _behind(rows: Tensor, begin: int) -> Tensor:
    """Rows (B, heads, T - begin, ...) after ``begin`` rows of zeros."""
    if not begin:
        return rows
    found = rows.new_zeros(*rows.shape[:2], begin + rows.shape[2], *rows.shape[3:])
    found[:, :, begin:] = rows
    return found


class _Joint(torch.autograd.Function):
    """``begin``: the first row that asks; see :func:`unrolled`."""

    @staticmethod
    def forward(ctx: Any, begin: int, queries: Tensor, keys: Tensor, values: Tensor, *later: Tensor) -> Tensor:
        scale, flash = queries.shape[3] ** -0.5, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ctx.begin, seen = begin, (queries, keys, values, *later)
        if begin == queries.shape[2]:
            ctx.save_for_backward(*seen)
            return torch.zeros_like(queries)
        queries, own_keys, own_values, *asked = (one[:, :, begin:] for one in seen)
        # Results and logs of sums of exponentials: of rows from ``begin`` on, of the prompt, of the columns of steps.
        mixed, masses = [], []
        for part, causal in (((own_keys, own_values), True), ((keys[:, :, :begin], values[:, :, :begin]), False)):
            if part[0].shape[2]:
                found, mass = flash(queries, *part, 0.0, causal, scale=scale)
                mixed.append(found)
                masses.append(mass.float())
        masses += [(queries * one).sum(-1, dtype=torch.float32) * scale for one in asked[::2]]
        total = torch.stack(masses).logsumexp(0)
        joint: Tensor = mixed[0] * (masses[0] - total).exp().to(queries.dtype)[..., None]
        for mass, one in zip(masses[1:], [*mixed[1:], *asked[1::2]], strict=True):
            joint += (mass - total).exp().to(joint.dtype)[..., None] * one
        ctx.save_for_backward(*seen, joint, total, *masses[len(mixed) :])
        return _behind(joint, begin)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        begin, saved = ctx.begin, ctx.saved_tensors
        count = 3 + (len(saved) - 5) // 3 * 2
        if begin == slopes[0].shape[2]:
            return None, *(torch.zeros_like(one) for one in saved)
        keys, values = saved[1:3]
        queries, own_keys, own_values, *later = (one[:, :, begin:] for one in saved[:count])
        joint, total, *own = saved[count:]
        slope, scale = slopes[0][:, :, begin:].contiguous(), queries.shape[3] ** -0.5
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        to_queries, to_keys, to_values = back(
            slope, queries, own_keys, own_values, joint, total, 0.0, True, scale=scale
        )
        if begin:
            seen = keys[:, :, :begin], values[:, :, :begin]
            more, *before = back(slope, queries, *seen, joint, total, 0.0, False, scale=scale)
            to_queries = to_queries + more
            to_keys, to_values = torch.cat([before[0], to_keys], 2), torch.cat([before[1], to_values], 2)
        level = (slope * joint).sum(-1, dtype=torch.float32)
        found = []
        for index, logits in enumerate(own):
            its_keys, its_values = later[2 * index], later[2 * index + 1]
            share = (logits - total).exp()
            rise = (share * ((slope * its_values).sum(-1, dtype=torch.float32) - level) * scale).to(slope.dtype)[
                ..., None
            ]
            to_queries = to_queries + rise * its_keys
            found += [_behind(rise * queries, begin), _behind(share.to(slope.dtype)[..., None] * slope, begin)]
        return None, _behind(to_queries, begin), to_keys, to_values, *found

"""Attention of a drafter that training unrolls over its own outputs ("training-time test", EAGLE-3).

In step k the row at position t sees the first step's rows up to t, which were made from the target's states, and its
own rows of the steps since. Taken as one softmax over all T + k columns this would cost a (T, T) matrix per head and
step. Here the causal part is a flash kernel's, whose sums are then joined with the few other columns; and its backward
pass is the same kernel's again, given the joint result and the joint sum: the derivative of a column of a softmax
depends on the other columns through these two alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


def unrolled(queries: Tensor, first: Pair, later: Seq[Pair], lengths: Seq[int] | None = None) -> Tensor:
    """What attention finds, (B, heads, T, head_size), of ``queries`` of that shape.

    ``first`` and each of ``later``: (B, kv_heads, T, head_size); a step's own columns are the last of ``later``.
    ``lengths``: of conversations that are packed end to end, each of which sees itself alone; they sum to T.
    """
    if lengths is not None:
        every = (queries, *first, *(one for pair in later for one in pair))
        alone = zip(*(torch.split(one, list(lengths), 2) for one in every), strict=True)
        parts = []
        for own, keys, values, *more in alone:
            parts.append(unrolled(own, (keys, values), list(zip(more[::2], more[1::2], strict=True))))
        return torch.cat(parts, 2)
    groups = queries.shape[1] // first[0].shape[1]
    wide = [one.repeat_interleave(groups, 1) for pair in (first, *later) for one in pair]
    if queries.device.type == "cpu":
        found: Tensor = _Joint.apply(queries, *wide)  # type: ignore[no-untyped-call]
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


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, *later: Tensor) -> Tensor:
        scale = queries.shape[3] ** -0.5
        mixed, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, True, scale=scale
        )
        # log of the sum of exponentials: of the causal columns, then of all
        own = [(queries * one).sum(-1, dtype=torch.float32) * scale for one in later[::2]]
        mass = mass.float()
        total = torch.stack([mass, *own]).logsumexp(0)
        joint: Tensor = mixed * (mass - total).exp().to(mixed.dtype)[..., None]
        for logits, one in zip(own, later[1::2], strict=True):
            joint += (logits - total).exp().to(mixed.dtype)[..., None] * one
        ctx.save_for_backward(queries, keys, values, joint, total, *own, *later)
        return joint

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        queries, keys, values, joint, total, *rest = ctx.saved_tensors
        own, later = rest[: len(rest) // 3], rest[len(rest) // 3 :]
        slope, scale = slopes[0].contiguous(), queries.shape[3] ** -0.5
        to_queries, to_keys, to_values = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            slope, queries, keys, values, joint, total, 0.0, True, scale=scale
        )
        level = (slope * joint).sum(-1, dtype=torch.float32)
        found = []
        for index, logits in enumerate(own):
            its_keys, its_values = later[2 * index], later[2 * index + 1]
            share = (logits - total).exp()
            rise = (share * ((slope * its_values).sum(-1, dtype=torch.float32) - level) * scale).to(slope.dtype)[
                ..., None
            ]
            to_queries = to_queries + rise * its_keys
            found += [rise * queries, share.to(slope.dtype)[..., None] * slope]
        return to_queries, to_keys, to_values, *found

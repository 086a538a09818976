"""Tree attention for Hugging Face models, through transformers' attention registry.

A forward runs over the rows of all trees laid end to end, (1, R). Linear layers see R rows without padding;
here each sequence's rows attend to its own committed K/V and, by the tree's ancestor mask, to each other.
The :class:`~outpace.targets.forward_plan.ForwardPlan` says which rows those are; it is current in this thread while the
forward runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from outpace.targets.forward_plan import ForwardPlan, SequenceRows
from outpace.targets.layered_kv import LayeredKV

IMPLEMENTATION = "outpace_tree"

SideKV = list[tuple[Tensor, Tensor] | None]
"""Keys and values of one tree's rows by layer, each (kv_heads, rows, head_dim); None where a layer has not run."""


def keys_values(part: SequenceRows, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Everything the new rows may attend to: committed rows, earlier rows of the tree, and themselves."""
    store: LayeredKV = part.store
    old = part.earlier_kv[layer] if part.earlier_kv is not None else None
    if old is not None:
        key, value = torch.cat([old[0], key], dim=1), torch.cat([old[1], value], dim=1)
    if part.tree is not None:
        part.side_kv[layer] = (key, value)
    if part.subset is None:
        return store.scratch(layer, key, value)
    chosen = part.subset if part.subset.dim() == 1 else part.subset[layer]
    read = store.gather(layer, chosen.to(key.device))
    if read is None:
        return key, value
    return torch.cat([read[0], key], dim=1), torch.cat([read[1], value], dim=1)


def mask(part: SequenceRows, layer: int, window: int | None, like: Tensor) -> Tensor | None:
    """Additive mask, made once per forward and window; None where every key is seen.

    (new rows, keys); (kv_heads, new rows, keys) where each head of ``layer`` reads other keys through a window.
    """
    by_head = window is not None and part.subset is not None and part.subset.dim() > 1
    name = (window, layer) if by_head else window
    if name not in part.memo:
        part.memo[name] = _mask(part, layer if by_head else None, window, like)
    found: Tensor | None = part.memo[name]
    return found


def _mask(part: SequenceRows, layer: int | None, window: int | None, like: Tensor) -> Tensor | None:
    device, new = like.device, part.new_rows
    if part.subset is None or (layer is None and part.subset.dim() > 1):
        committed = torch.arange(part.committed, device=device)  # which ones they are does not matter
    else:
        committed = (part.subset if layer is None else part.subset[layer]).to(device)
    if part.tree is None:
        visible = torch.ones(new, new, dtype=torch.bool, device=device).tril_()
    else:
        visible = part.tree.ancestor_mask()[part.earlier_rows :].to(device)
    seen = torch.cat([visible.new_ones(new, part.committed), visible], dim=1)
    if window is not None:
        positions = torch.tensor(part.positions, device=device)
        columns = torch.cat([committed, positions.expand(*committed.shape[:-1], -1)], dim=-1)
        seen = seen & (positions[-new:, None] - columns[..., None, :] < window)
    if bool(seen.all()):
        return None
    return torch.zeros(seen.shape, dtype=like.dtype, device=device).masked_fill_(~seen, float("-inf"))


_current = threading.local()


def current() -> ForwardPlan | None:
    """The plan of the forward that runs in this thread, if it is one of ours."""
    return getattr(_current, "plan", None)


@contextmanager
def running(plan: ForwardPlan) -> Iterator[None]:
    """Make ``plan`` current."""
    before = current()
    _current.plan = plan
    try:
        yield
    finally:
        _current.plan = before


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: (1, heads, R, d) queries -> (1, R, heads, d)."""
    plan = current()
    if plan is None:
        raise RuntimeError("outpace's attention was called outside an outpace forward")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if plan.calls is not None:
        plan.calls.append((module, {"sliding_window": sliding_window, **extra}))
    if plan.queries is not None:
        plan.queries[layer] = query[0].transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    for part in plan.parts:
        if part.new_rows == 0:
            continue
        rows = slice(part.start, part.stop)
        keys, values = keys_values(part, layer, key[0, :, rows], value[0, :, rows])
        seen = mask(part, layer, sliding_window, query)
        out[rows] = _attend(query[0, :, rows], keys, values, seen, scale, softcap).transpose(0, 1)
    return out[None], None


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """(heads, rows, d) over (kv_heads, keys, d) -> (heads, rows, d); ``mask``: (rows, keys), or one a K/V head."""
    heads, rows, _ = query.shape
    groups = heads // keys.shape[0]
    if rows <= 4 and groups > 1 and softcap is None:
        # Query heads that share a K/V head become rows of one head: at few rows several times quicker than GQA in SDPA.
        folded = query.reshape(1, keys.shape[0], groups * rows, -1)
        wide = None if mask is None else mask.repeat(*(1,) * (mask.dim() - 2), groups, 1)
        return sdpa(folded, keys[None], values[None], attn_mask=wide, scale=scale).view(heads, rows, -1)
    if mask is not None and mask.dim() > 2:
        mask = mask.repeat_interleave(groups, 0)
    if softcap is not None:
        logits = torch.matmul(query, keys.repeat_interleave(groups, 0).transpose(1, 2)) * scale
        logits = softcap * torch.tanh(logits / softcap)
        weights = (logits if mask is None else logits + mask).softmax(-1, dtype=torch.float32)
        return torch.matmul(weights.to(values.dtype), values.repeat_interleave(groups, 0))
    if query.device.type == "cpu":
        return sdpa(query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=groups > 1)[0]
    # On CUDA a mask together with enable_gqa falls back to the slow path.
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    return sdpa(query[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]


def install() -> None:
    """Register the attention function. No mask function is registered beside it, so transformers builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, tree_attention)

"""Parts of heads' networks, as they are trained: a decoder layer whose attention is handed what to see.

Names of weights are those of the Llama family, so that checkpoints of the field map onto them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from outpace.heads.head_config import HeadConfig
from outpace.targets.rotary import angles, rotate, turns


class Attention(nn.Module):
    """Grouped-query attention. ``inputs``: width of what it reads. ``norms``: RMSNorm of queries and keys (Qwen3's)."""

    def __init__(self, config: HeadConfig, inputs: int, *, norms: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.theta = config.rope_theta
        self.q_proj = nn.Linear(inputs, self.heads * self.head_size, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_size, config.hidden_size, bias=False)
        if norms:
            self.q_norm = nn.RMSNorm(self.head_size, config.epsilon)
            self.k_norm = nn.RMSNorm(self.head_size, config.epsilon)
        self.norms = norms

    def queries(self, rows: Tensor, positions: Tensor) -> Tensor:
        """(B, heads, T, head_size) of (B, T, inputs), turned to ``positions`` (T) or (B, T)."""
        found = self._split(self.q_proj(rows), self.heads)
        return self._rotated(self.q_norm(found) if self.norms else found, positions)

    def keys_values(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Two of (B, kv_heads, T, head_size)."""
        keys, values = self._split(self.k_proj(rows), self.kv_heads), self._split(self.v_proj(rows), self.kv_heads)
        return self._rotated(self.k_norm(keys) if self.norms else keys, positions), values

    def _rotated(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of (B, heads, T, head_size), in float32."""
        turned = turns(angles(positions, self.head_size, self.theta))
        return rotate(rows.float(), turned if positions.dim() == 1 else turned[:, :, None]).to(rows.dtype)

    @staticmethod
    def _split(rows: Tensor, heads: int) -> Tensor:
        return rows.view(*rows.shape[:-1], heads, rows.shape[-1] // heads).transpose(1, 2)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, hidden). ``mask``: None for causal, else bool or additive, broadcastable to (B, heads, T, S)."""
        found = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
        )
        return self.merged(found)

    def merged(self, found: Tensor) -> Tensor:
        """(B, heads, T, head_size) through the output projection: (B, T, hidden)."""
        rows: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return rows


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """(..., hidden) to (..., hidden)."""
        found: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return found


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: HeadConfig, *, inputs: int = 0, norms: bool = False, first_norm: bool = True) -> None:
        """``inputs``: width of what attention reads (the hidden size); ``first_norm``: whether a norm is before it."""
        super().__init__()
        self.self_attn = Attention(config, inputs or config.hidden_size, norms=norms)
        self.mlp = Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.epsilon) if first_norm else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.epsilon)

    def feed(self, stream: Tensor) -> Tensor:
        """The MLP's half: (..., hidden)."""
        found: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return found


def initialised(module: nn.Module, deviation: float = 0.02) -> None:
    """Normal weights for every matrix, ones for norms."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=deviation)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


class Uninitialised(TorchFunctionMode):
    """Modules that are made inside keep whatever their memory holds: for shapes, and for weights that are then loaded.

    On the meta device torch would import its compiler to draw random numbers, which takes seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def shifted(rows: Tensor, by: int) -> Tensor:
    """(B, T, ...) moved ``by`` positions towards the beginning; what comes in at the end is zero (False)."""
    if by == 0:
        return rows
    moved = torch.zeros_like(rows)
    moved[:, :-by] = rows[:, by:]
    return moved

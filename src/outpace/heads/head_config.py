"""HeadConfig: what ``config.json`` of a head says, and the sizes that a new head gets for its target."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, Field

from outpace.core.names import unknown
from outpace.core.validation import StrictModel

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "training.json"
"""Files of a head's folder."""
FORMAT = 1

SIZES = {"tiny": 0.25, "small": 0.5, "base": 1.0, "large": 2.0}
"""``outpace train --size``: the MLP's width as a share of the usual 8/3 of the hidden size."""


_Size = Annotated[int, Field(ge=1, le=2**24)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class TargetFacts(StrictModel):
    """The target that a head was made for; ``fingerprint`` is :func:`outpace.heads.fingerprint.probe`'s."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    fingerprint: list[_Finite]


class HeadConfig(StrictModel):
    """``config.json`` of a head.

    ``aux_hidden_state_layers``: the target's layers whose input it reads, counted from 0; ``num_layers`` is the output
    of the last layer.
    """

    format: int = 1
    kind: str
    target: TargetFacts
    aux_hidden_state_layers: tuple[int, ...] = Field(
        validation_alias=AliasChoices("aux_hidden_state_layers", "taps")  # taps: heads of outpace 0.1
    )
    vocabulary: int = Field(description="size of its draft vocabulary")
    rank: int = Field(0, ge=0, description="of a low-rank LM head; 0: the target's rows")
    layers: int = Field(1, ge=1, le=128)
    intermediate: _Size
    heads: _Size
    kv_heads: _Size
    head_size: _Size
    epsilon: float = Field(1e-5, ge=0, allow_inf_nan=False)
    rope_theta: float = Field(10000.0, gt=0, allow_inf_nan=False)
    context_length: int = Field(8192, ge=1, le=2**31)
    options: dict[str, Any] = Field(default_factory=dict)
    rank_accuracies: tuple[tuple[float, ...], ...] = Field(
        (), description="of parallel heads: how often the r-th choice of head k was the right token"
    )

    @property
    def hidden_size(self) -> int:
        """Heads are as wide as their target."""
        return self.target.hidden_size


def shapes(hidden: int, size: str) -> dict[str, int]:
    """Sizes of a head's layers for a target of width ``hidden``. Raises BadInput for a ``size`` that SIZES lacks."""
    if size not in SIZES:
        raise unknown("size", size, list(SIZES))
    # Rotary embeddings need an even head size; for an odd hidden size all heads together are narrower than it.
    head_size = next((width for width in (64, 32, 16, 8, 4, 2) if hidden % width == 0), 2)
    heads = max(1, hidden // head_size)
    kv_heads = next(count for count in range(max(1, heads // 3), heads + 1) if heads % count == 0)
    intermediate = max(8, round(SIZES[size] * hidden * 8 / 3 / 64) * 64)
    return {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "intermediate": intermediate}


def shared_out(hidden: int, size: str, layers: int) -> dict[str, int]:
    """Sizes of ``layers`` layers whose MLPs together are as wide as that of one layer of :func:`shapes`."""
    found = shapes(hidden, size)
    found["intermediate"] = max(8, found["intermediate"] // layers // 32 * 32)
    return found


def low_middle_high(layers: int) -> tuple[int, ...]:
    """The auxiliary layers that EAGLE-3 reads of a target of ``layers`` layers (Li et al. 2025, arXiv 2503.01840)."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))

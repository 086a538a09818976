"""DecoderSpec: the sizes, constants and weights that make a dense decoder, whatever model or head they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Matrix:
    """A linear layer's weight (outputs, inputs) and bias. ``name``: what GGUF files call it, without the suffix."""

    weight: Tensor
    bias: Tensor | None = None
    name: str = ""


@dataclass(slots=True)
class LayerSpec:
    """One layer. ``norms`` by the names in binding.NORMS; a sublayer without one reads the stream as it is.

    ``window``: how many positions back it sees, 0 for all. ``rotation``: index in :attr:`DecoderSpec.rotations`.
    """

    query: Matrix
    key: Matrix
    value: Matrix
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    norms: dict[str, Matrix]
    window: int = 0
    rotation: int = 0


@dataclass(slots=True)
class Entry:
    """What makes the first layer's states of rows of another width: ``matrix`` (hidden, inputs).

    ``before``: weights (inputs) of RMS norms, one over each ``hidden`` inputs; ``after``: weights (hidden) of the one
    over the product.
    """

    matrix: Matrix
    before: Matrix | None = None
    after: Matrix | None = None


@dataclass(slots=True)
class DecoderSpec:
    """A whole decoder. Sizes count dimensions, heads, tokens.

    ``rotations``: functions from positions (n,) to cosines and sines, each (n, rotated / 2), float32.
    ``context_length`` in tokens; ``context_note``: why it ends there, when that is not the model's own limit.
    ``softcap`` and ``final_softcap`` bound attention scores and logits (0: not).
    """

    layers: list[LayerSpec]
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    activation: str
    epsilon: float
    attention_scale: float
    embedding: Matrix
    lm_head: Matrix | None
    """None where the LM head is the embedding (tied)."""
    final_norm: Matrix | None
    rotations: list[Callable[[Tensor], tuple[Tensor, Tensor]]]
    context_length: int
    context_note: str
    softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    second_norm: Matrix | None = None
    """Weights of a norm under which layer 0 reads a token's embedding beside the residual stream, as EAGLE-3's does:
    its projections have 2 * hidden inputs, the embedding's first."""
    entry: Entry | None = None
    """For rows that are neither tokens nor states, as those of EAGLE's heads."""
    dtype: torch.dtype = field(default=torch.float32)
    device: torch.device = field(default=torch.device("cpu"))

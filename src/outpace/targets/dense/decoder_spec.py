"""DecoderSpec: the sizes, constants and weights that make a dense decoder, whatever model or head they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outpace.targets.dense.binding import Packed


Rotation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From positions (n,) to cosines and sines, each (n, rotated / 2), float32."""


class Stored(Protocol):
    """A matrix in the blocks of a GGUF file, which is read when a method is called."""

    def blocks(self) -> Packed:
        """The blocks as they lie in the file, their rows in the model's order."""
        ...

    def rows(self, chosen: Tensor | None = None) -> Tensor:
        """The values of some rows, or of all: (rows, inputs) float32."""
        ...


@dataclass(slots=True)
class Matrix:
    """A linear layer's weight (outputs, inputs) and bias. ``name``: what GGUF files call it, without the suffix.

    Where it is ``stored``, ``weight`` has a shape and no values (torch's meta device).
    """

    weight: Tensor
    bias: Tensor | None = None
    name: str = ""
    stored: Stored | None = None

    def rows(self, chosen: Tensor | None = None) -> Tensor:
        """The values of some rows, or of all: (rows, inputs) float32."""
        if self.stored is not None:
            return self.stored.rows(chosen)
        return (self.weight if chosen is None else self.weight[chosen]).float()

    def dense(self, dtype: torch.dtype) -> Matrix:
        """The same with values in memory, in ``dtype``."""
        weight = self.weight if self.stored is None else self.stored.rows()
        return Matrix(weight.to(dtype), None if self.bias is None else self.bias.to(dtype), self.name)


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

    def dense(self, dtype: torch.dtype) -> LayerSpec:
        """The same with its matrices in memory, in ``dtype``; norms stay as they are."""
        names = ("query", "key", "value", "out", "gate", "up", "down")
        return replace(self, **{name: getattr(self, name).dense(dtype) for name in names})


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

    ``context_length`` in tokens; ``context_note``: why it ends there, when that is not the model's own limit.
    ``softcap`` and ``final_softcap`` bound attention scores and logits (0: not).
    """

    layers: Sequence[LayerSpec]
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
    rotations: list[Rotation]
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
    in_blocks: bool = False
    """Whether matrices may be :attr:`Matrix.stored`."""

    def dense(self) -> DecoderSpec:
        """The same with all its matrices in memory, in its ``dtype``."""
        head = None if self.lm_head is None else self.lm_head.dense(self.dtype)
        layers = [layer.dense(self.dtype) for layer in self.layers]
        return replace(self, layers=layers, embedding=self.embedding.dense(self.dtype), lm_head=head, in_blocks=False)

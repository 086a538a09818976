"""The network of Medusa-1 (Cai et al. 2024, arXiv 2401.10774): parallel heads on the frozen target's last state.

Each head reads the state behind the target's final norm, which the target's own LM head reads. Head k, from 0, predicts
the token k + 2 positions on; the next token is the target's own prediction. A head is a stack of residual blocks
x + SiLU(W x + b), which begin as the identity, so that every head begins as the target's LM head.

Unlike the paper's, heads learn the target's distribution and not only its token, and share one LM head. A head grows by
``layers``.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from outpace.core.validation import StrictModel
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig
from outpace.heads.kinds import kind
from outpace.heads.lm_head import Product
from outpace.heads.parallel_heads import Network, ParallelHeads
from outpace.targets.base import Target


class MedusaOptions(StrictModel):
    """Settings of a ``medusa`` head."""

    heads: int = Field(4, ge=1, le=16, description="heads, one for each position to come")
    layers: int = Field(1, ge=1, le=8, description="residual blocks of each head")
    decay: float = Field(0.8, gt=0.0, le=1.0, description="weight of a head's loss relative to the head before")


@kind("medusa")
class Medusa(ParallelHeads):
    """Weights: ``blocks.K.L.weight`` and ``.bias``, head K's L-th block."""

    Options = MedusaOptions
    paper = "Cai et al. 2024, arXiv 2401.10774"

    def __init__(self, config: HeadConfig, draft_vocabulary: DraftVocabulary) -> None:
        super().__init__(config, draft_vocabulary)
        hidden = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(self.options.layers))
            for _ in range(self.options.heads)
        )
        for weight in self.blocks.parameters():
            nn.init.zeros_(weight)

    @classmethod
    def depth_of(cls, options: Any) -> int:
        layers: int = options.layers
        return layers

    def chains(self) -> list[list[nn.Linear]]:
        """Each head's blocks, in order."""
        depth, blocks = self.options.layers, [one for one in self.blocks.modules() if isinstance(one, nn.Linear)]
        return [blocks[start : start + depth] for start in range(0, len(blocks), depth)]

    def predicted(self, normed: Tensor) -> Tensor:
        found = []
        for blocks in self.chains():
            state = normed
            for block in blocks:
                state = state + functional.silu(block(state))
            found.append(state)
        return torch.stack(found, 1)

    def beside(self, target: Target) -> Network:
        """The residual blocks of all heads, their matrices packed as the target's are."""
        # All heads' first blocks read the same rows: they are one product.
        layers = list(zip(*self.chains(), strict=True))
        first = Product(self.config, torch.cat([one.weight for one in layers[0]]), target)
        later = [[Product(self.config, one.weight, target) for one in layer] for layer in layers[1:]]
        biases = [torch.stack([one.bias.detach().float() for one in layer]).to(first.device) for layer in layers]

        def run(normed: Tensor) -> Tensor:
            added = first(normed).view(len(normed), *biases[0].shape)
            states = normed[:, None] + functional.silu(added + biases[0])
            for products, bias in zip(later, biases[1:], strict=True):
                added = torch.stack([one(states[:, index].contiguous()) for index, one in enumerate(products)], 1)
                states = states + functional.silu(added + bias)
            return states

        return run

"""The network of blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115): one layer for all heads.

Each of its outputs is added to the target's last state. Unlike the paper's, its width follows from ``--size`` alone,
whatever the number of heads, and it learns the target's distribution and not only its token.
"""

from __future__ import annotations

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


class BpdOptions(StrictModel):
    """Settings of a ``bpd`` head."""

    heads: int = Field(4, ge=1, le=16, description="positions that are predicted at once")
    decay: float = Field(1.0, gt=0.0, le=1.0, description="weight of a position's loss relative to the one before")


@kind("bpd")
class Bpd(ParallelHeads):
    """Weights: ``inner`` (hidden to the layer's width), ``outer`` (to heads times hidden)."""

    Options = BpdOptions
    paper = "Stern et al. 2018, arXiv 1811.03115"

    def __init__(self, config: HeadConfig, draft_vocabulary: DraftVocabulary) -> None:
        super().__init__(config, draft_vocabulary)
        self.inner = nn.Linear(config.hidden_size, config.intermediate)
        self.outer = nn.Linear(config.intermediate, self.options.heads * config.hidden_size)
        nn.init.normal_(self.inner.weight, std=config.hidden_size**-0.5)
        for weight in (self.inner.bias, self.outer.weight, self.outer.bias):
            nn.init.zeros_(weight)

    def predicted(self, normed: Tensor) -> Tensor:
        added: Tensor = self.outer(functional.relu(self.inner(normed)))
        return normed[:, None] + added.view(len(normed), self.options.heads, -1)

    def beside(self, target: Target) -> Network:
        """The feed-forward layer, its matrices packed as the target's are."""
        inner, outer = (Product(self.config, one.weight, target) for one in (self.inner, self.outer))
        first, second = (one.bias.detach().float().to(inner.device) for one in (self.inner, self.outer))

        def run(normed: Tensor) -> Tensor:
            added = outer(functional.relu(inner(normed) + first)) + second
            return normed[:, None] + added.view(len(normed), -1, normed.shape[1])

        return run

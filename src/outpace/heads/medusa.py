"""Parallel heads on the target's last state: several positions are said at once, none knowing what the others become.

What they read is the state behind the target's final norm, what its own LM head reads. Head k, from 0, says the token
k + 2 positions on: the next one is the target's own business. All score the same words.

``medusa`` (Medusa-1, the target stays as it is: Cai et al. 2024, arXiv 2401.10774): each head is a stack of residual
blocks x + SiLU(W x + b), which begin as the identity, so that every head begins as the target's LM head. ``bpd``
(blockwise parallel decoding: Stern et al. 2018, arXiv 1811.03115): one feed-forward layer for all heads together, whose
outputs are each added to the state.

Ours, beside the papers: heads learn the target's distribution, not its token alone; an LM head is not each head's own.
The feed-forward layer of ``bpd`` is as wide as the dial for size says, whatever the number of heads; a ``medusa`` head
grows by ``layers``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from outpace.heads.base import Batch, Head, HeadConfig, Teacher, kind
from outpace.heads.blocks import shifted
from outpace.heads.words import Words
from outpace.training.losses import soft_cross_entropy


class ParallelHeads(Head):
    """What both kinds share: which token each head is to say, and how wrong it is."""

    matrix_rate = 0.06
    """One layer between the target's state and its LM head, which begins as nothing: it has further to go."""

    @classmethod
    def taps_of(cls, layers: int, options: Any) -> tuple[int, ...]:  # noqa: ARG003
        return (layers,)

    @abstractmethod
    def said(self, normed: Tensor) -> Tensor:
        """(n, heads, hidden), ready for the LM head, of states (n, hidden) behind the target's final norm."""

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        said, place = teacher.says(batch)
        # Nobody can be taught a token that is not among the words, and nothing is drafted behind one.
        wanted = batch.answer & (self.words.places(len(teacher.embedding))[batch.tokens] >= 0)
        # A draft begins behind a token of which no state is known: a state's first draft token is two positions on.
        first = alive = shifted(wanted, 2)
        normed = teacher.norm(batch.states[teacher.final][first])
        states = self.said(normed.to(next(self.parameters()).dtype))
        total, weights = torch.zeros((), device=normed.device), 0.0
        found: dict[str, Tensor] = {}
        for index in range(self.options.heads):
            alive = alive & shifted(wanted, 2 + index)
            places = shifted(place, 1 + index)[alive]
            loss, hits = soft_cross_entropy(states[alive[first], index], self.words, said, places)
            weight = self.options.decay**index
            total, weights = total + weight * loss, weights + weight
            found[f"agree_{index + 1}"] = hits
        return {"loss": total / weights, **found}


class MedusaOptions(BaseModel):
    """Settings of a ``medusa`` head."""

    model_config = ConfigDict(extra="forbid")

    heads: int = Field(4, ge=1, le=16, description="heads, one for each position to come")
    layers: int = Field(1, ge=1, le=8, description="residual blocks of each head")
    decay: float = Field(0.8, gt=0.0, le=1.0, description="weight of a head's loss relative to the head before")


@kind("medusa")
class Medusa(ParallelHeads):
    """Weights: ``blocks.K.L.weight`` and ``.bias``, head K's L-th block."""

    Options = MedusaOptions
    paper = "Cai et al. 2024, arXiv 2401.10774"

    def __init__(self, config: HeadConfig, words: Words) -> None:
        super().__init__(config, words)
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

    def said(self, normed: Tensor) -> Tensor:
        found = []
        for blocks in self.chains():
            state = normed
            for block in blocks:
                state = state + functional.silu(block(state))
            found.append(state)
        return torch.stack(found, 1)


class BpdOptions(BaseModel):
    """Settings of a ``bpd`` head."""

    model_config = ConfigDict(extra="forbid")

    heads: int = Field(4, ge=1, le=16, description="positions to come that are said at once")
    decay: float = Field(1.0, gt=0.0, le=1.0, description="weight of a position's loss relative to the one before")


@kind("bpd")
class Bpd(ParallelHeads):
    """Weights: ``inner`` (hidden to the layer's width), ``outer`` (to heads times hidden)."""

    Options = BpdOptions
    paper = "Stern et al. 2018, arXiv 1811.03115"

    def __init__(self, config: HeadConfig, words: Words) -> None:
        super().__init__(config, words)
        self.inner = nn.Linear(config.hidden_size, config.intermediate)
        self.outer = nn.Linear(config.intermediate, self.options.heads * config.hidden_size)
        nn.init.normal_(self.inner.weight, std=config.hidden_size**-0.5)
        for weight in (self.inner.bias, self.outer.weight, self.outer.bias):
            nn.init.zeros_(weight)

    def said(self, normed: Tensor) -> Tensor:
        added: Tensor = self.outer(functional.relu(self.inner(normed)))
        return normed[:, None] + added.view(len(normed), self.options.heads, -1)

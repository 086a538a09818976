"""DFlash (Chen et al. 2026, arXiv 2602.06036): one forward drafts a block of tokens.

A block is the last committed token and masks for the tokens to come. Its rows see each other, and the target's states
of all tokens before the block: three of the target's layers, fused by a linear layer, enter every layer's keys and
values beside those of the rows. Row ``j`` predicts the token ``j`` positions after the last committed one, without the
tokens between.

The last committed token has no state yet when a block is drafted, and training hides it as well: a block that begins at
token ``a`` sees the states of tokens before ``a``. Blocks of one conversation are trained side by side, from random
beginnings in the target's answers. Errors early in a block waste all that follows, so they weigh more: a position's
weight falls by e over ``gamma`` positions.

Unlike in the paper, labels are the target's distributions and not its tokens; the mask is an embedding of its own,
since most targets have no mask token; the draft vocabulary may be reduced; in ``causal`` blocks a row sees only the
rows before it, so that a shorter draft is the beginning of a longer one. More layers are narrower: a ``--size`` has
about as many weights with any number of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.core.validation import StrictModel
from outpace.heads.base import Batch, Head, Teacher
from outpace.heads.blocks import DecoderLayer, initialised
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig, low_middle_high, shapes
from outpace.heads.kinds import kind
from outpace.heads.losses import soft_cross_entropy
from outpace.targets.base import Target

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


class DFlashOptions(StrictModel):
    """Settings of a ``dflash`` head."""

    block: int = Field(8, ge=2, le=64, description="rows of a block: the last committed token, and the drafted ones")
    layers: int = Field(2, ge=1, le=16, description="decoder layers")
    every: int = Field(3, ge=1, description="a block is trained from one of so many of the answers' tokens, at random")
    gamma: float = Field(4.0, gt=0.0, description="positions over which the loss's weight falls by e")
    causal: bool = Field(False, description="whether rows of a block see the rows before them alone")


@kind("dflash")
class DFlash(Head):
    """Weights: ``fc``, ``hidden_norm``, ``layers`` with norms of queries and keys, ``norm``, ``mask_embedding``."""

    Options = DFlashOptions
    paper = "Chen et al. 2026, arXiv 2602.06036"

    def __init__(self, config: HeadConfig, draft_vocabulary: DraftVocabulary) -> None:
        super().__init__(config, draft_vocabulary)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.aux_hidden_state_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, config.epsilon)
        self.layers = nn.ModuleList(DecoderLayer(config, norms=True) for _ in range(config.layers))
        self.norm = nn.RMSNorm(hidden, config.epsilon)
        self.mask_embedding = nn.Parameter(torch.empty(hidden))
        nn.init.normal_(self.mask_embedding, std=0.02)
        initialised(self)

    @property
    def longest_draft(self) -> int:
        return int(self.options.block) - 1

    @classmethod
    def aux_layers_of(cls, layers: int, options: Any) -> tuple[int, ...]:  # noqa: ARG003 - other kinds do
        return low_middle_high(layers)

    @classmethod
    def depth_of(cls, options: Any) -> int:
        return int(options.layers)

    @classmethod
    def shapes_of(cls, hidden: int, size: str, options: Any) -> dict[str, int]:
        found = shapes(hidden, size)
        narrow = max(8, round(found["intermediate"] / options.layers / 64) * 64)
        return {**found, "intermediate": narrow}

    def initialise(self, target: Target, teacher: Teacher) -> None:
        # The borrowed LM head expects the target's own norm before it; of a state of ones it shows its weights.
        self.norm.weight.data.copy_(target.final_norm(torch.ones(1, self.config.hidden_size))[0])
        nn.init.normal_(self.mask_embedding, std=float(teacher.embedding.float().std()))

    def context(self, states: list[Tensor]) -> Tensor:
        """The target's states of tokens, (..., hidden) each, as every layer's keys and values read them."""
        found: Tensor = self.hidden_norm(self.fc(torch.cat(states, -1).to(self.fc.weight.dtype)))
        return found

    def seen(self) -> Tensor:
        """(block, block) bool: which rows of its block a row sees."""
        whole = torch.ones(self.options.block, self.options.block, dtype=torch.bool)
        return whole.tril_() if self.options.causal else whole

    def blocks(self, context: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """What leaves the last layer, behind the final norm: (B, A, block, hidden).

        ``context`` (B, T, hidden); ``anchors`` (B, A) long: where blocks begin; ``embedded`` (B, A, hidden): the
        tokens there. A block sees the context before its beginning.
        """
        rows, count = self.options.block, anchors.shape[1]
        size, length = context.shape[:2]
        stream = self.mask_embedding.to(context.dtype).expand(size, count, rows, -1).clone()
        stream[:, :, 0] = embedded.to(context.dtype)
        stream = stream.flatten(1, 2)
        before = torch.arange(length, device=context.device)
        positions = (anchors[..., None] + torch.arange(rows, device=context.device)).flatten(1)
        visible = (before < anchors[..., None]).repeat_interleave(rows, 1)
        layers: Any = self.layers
        for layer in layers:
            attention, normed = layer.self_attn, layer.input_layernorm(stream)
            shared, own = attention.keys_values(context, before), attention.keys_values(normed, positions)
            stream = layer.feed(
                stream + attention.merged(self._attend(attention.queries(normed, positions), shared, own, visible))
            )
        found: Tensor = self.norm(stream).view(size, count, rows, -1)
        return found

    def _attend(self, queries: Tensor, shared: Pair, own: Pair, visible: Tensor) -> Tensor:
        """One softmax over the context and a row's own block: (B, heads, A * block, head_size), as ``queries``.

        ``shared``: K/V of the context, (B, kv_heads, T, head_size), ``own`` of all blocks; ``visible`` (B, A * block,
        T): which context a row sees. Taken apart because no row sees another block, and most are another.
        """
        rows, (size, heads, count, width) = self.options.block, queries.shape
        kv_heads, length = shared[0].shape[1:3]
        grouped = (queries * width**-0.5).reshape(size, kv_heads, heads // kv_heads, count, width)
        far = (grouped.flatten(2, 3) @ shared[0].transpose(2, 3)).view(size, kv_heads, -1, count, length)
        far = far.masked_fill(~visible[:, None, None], -math.inf)
        keys, values = (one.reshape(size, kv_heads, 1, count // rows, rows, width) for one in own)
        near = grouped.view(size, kv_heads, -1, count // rows, rows, width) @ keys.transpose(4, 5)
        if self.options.causal:
            near = near.masked_fill(~self.seen().to(near.device), -math.inf)
        shares = torch.cat([far, near.flatten(3, 4)], -1).softmax(-1)
        found = (shares[..., :length].flatten(2, 3) @ shared[1]).view(grouped.shape)
        mine = shares[..., length:].reshape(near.shape) @ values
        joined: Tensor = (found + mine.view(grouped.shape)).view(queries.shape)
        return joined

    def anchors(self, answer: Tensor) -> tuple[Tensor, Tensor]:
        """Where blocks begin: random tokens that an answer's token follows, (B, A) long, and which of them count.

        ``answer`` (B, T). While the head is evaluated the same ones every time.
        """
        follows = torch.zeros_like(answer)
        follows[:, :-1] = answer[:, 1:]
        wanted = -(-follows.sum(1) // self.options.every)
        most = max(1, int(wanted.max()))
        generator = None if self.training else torch.Generator().manual_seed(0)
        lots = torch.rand(answer.shape, generator=generator).to(answer.device) + 1e-6
        best = lots.masked_fill(~follows, 0.0).topk(most, dim=1).indices
        return best, torch.arange(most, device=answer.device) < wanted[:, None]

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        anchors, alive = self.anchors(batch.answer)
        context = self.context([batch.states[layer] for layer in self.config.aux_hidden_state_layers])
        targets, place = teacher.target_probs(batch)
        found = self.blocks(context, teacher.embedding[batch.tokens.gather(1, anchors)], anchors)
        # A token outside of the draft vocabulary cannot be learned, and nothing is drafted after one.
        known = batch.answer & (self.draft_vocabulary.t2d(len(teacher.embedding))[batch.tokens] >= 0)
        total, weights = torch.zeros((), device=context.device), 0.0
        figures: dict[str, Tensor] = {}
        last = known.shape[1] - 1
        for step in range(1, self.options.block):
            at = anchors + step
            alive = alive & (at <= last) & known.gather(1, at.clamp_max(last))
            there = place.gather(1, (at - 1).clamp_max(last))[alive]
            loss, hits = soft_cross_entropy(found[:, :, step][alive], self.draft_vocabulary, targets, there)
            weight = math.exp(-(step - 1) / self.options.gamma)
            total, weights = total + weight * loss, weights + weight
            figures[f"agree_{step}"] = hits
        return {"loss": total / weights, **figures}

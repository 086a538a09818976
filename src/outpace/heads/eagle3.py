"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer over fused low, middle and high states of the target.

A row holds a token and the state before it: at first the target's own three states, fused by a linear layer, later what
the drafter itself made for the row before. Its attention reads the token's embedding and that state, each behind its
norm, side by side. Training unrolls the drafter over its own outputs ("training-time test"), and asks for the target's
distribution alone: no state is to be matched. Words are a reduced vocabulary.

``norms="attdrift"`` places two norms otherwise (Attention Drift): an RMSNorm on each captured state before they are
fused, and the final norm's output handed on to the next row, so that states keep their size along a chain.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from outpace.heads.base import Batch, Head, HeadConfig, Teacher, kind
from outpace.heads.blocks import DecoderLayer, initialised, shifted
from outpace.heads.words import Words
from outpace.targets.base import Target
from outpace.training.losses import soft_cross_entropy


class Eagle3Options(BaseModel):
    """Settings of an ``eagle3`` head."""

    model_config = ConfigDict(extra="forbid")

    steps: int = Field(4, ge=1, le=16, description="how far training unrolls the drafter over its own outputs")
    decay: float = Field(0.8, gt=0.0, le=1.0, description="weight of a step's loss relative to the one before")
    norms: Literal["eagle3", "attdrift"] = Field("eagle3", description="where norms are placed")


@kind("eagle3")
class Eagle3(Head):
    """Weights: ``fc``, ``layers.0`` with ``hidden_norm`` beside its own norms, ``norm``."""

    Options = Eagle3Options
    paper = "Li et al. 2025, arXiv 2503.01840"

    def __init__(self, config: HeadConfig, words: Words) -> None:
        super().__init__(config, words)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        layer = DecoderLayer(config, inputs=2 * hidden)
        layer.hidden_norm = nn.RMSNorm(hidden, config.epsilon)
        self.layers = nn.ModuleList([layer])
        self.norm = nn.RMSNorm(hidden, config.epsilon)
        if self.options.norms == "attdrift":
            self.tap_norms = nn.ModuleList(nn.RMSNorm(hidden, config.epsilon) for _ in config.taps)
        initialised(self)

    @classmethod
    def taps_of(cls, layers: int, options: Any) -> tuple[int, ...]:
        return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))

    def initialise(self, target: Target, teacher: Teacher) -> None:
        self.norm.weight.data.fill_(1.0)

    def fused(self, states: list[Tensor]) -> Tensor:
        """The target's states of one token, (..., hidden) each, as the state that the next token's row begins with."""
        if self.options.norms == "attdrift":
            states = [norm(one) for norm, one in zip(self.tap_norms, states, strict=True)]
        found: Tensor = self.fc(torch.cat(states, -1).to(self.fc.weight.dtype))
        return found

    def handed_on(self, stream: Tensor) -> Tensor:
        """The state that the next row begins with, of the stream that left the layer."""
        found: Tensor = self.norm(stream) if self.options.norms == "attdrift" else stream
        return found

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        layer, attention = self.layers[0], self.layers[0].self_attn
        state = self.fused([batch.states[tap] for tap in self.config.taps])
        said, place = teacher.says(batch)
        count = batch.tokens.shape[1]
        where = torch.arange(count, device=state.device)
        later: list[tuple[Tensor, Tensor]] = []
        found: dict[str, Tensor] = {}
        total, weights = torch.zeros((), device=state.device), 0.0
        for step in range(self.options.steps):
            # Row t reads token t + 1 + step and says token t + 2 + step.
            embedded = teacher.embedding[shifted(batch.tokens, 1 + step)].to(state.dtype)
            rows = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], -1)
            positions = where + step
            queries, (keys, values) = attention.queries(rows, positions), attention.keys_values(rows, positions)
            if step == 0:
                first = (keys, values)
                attended = attention.attend(queries, keys, values, None)
            else:
                later.append((keys, values))
                attended = _unrolled(attention, queries, first, later)
            stream = layer.feed(state + attended)
            wanted = shifted(batch.answer, 2 + step)
            kept = wanted.flatten().nonzero()[:, 0]
            there = shifted(place, 1 + step).flatten()[kept]
            loss, hits = soft_cross_entropy(self.norm(stream).flatten(0, 1)[kept], self.words.matrix, said, there)
            total = total + self.options.decay**step * loss
            weights += self.options.decay**step
            found[f"agree_{step + 1}"] = hits
            state = self.handed_on(stream)
        return {"loss": total / weights, **found}


def _unrolled(attention: Any, queries: Tensor, first: tuple[Tensor, Tensor], later: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of an unrolled step: row t sees the first step's rows up to t, and its own of the steps since.

    (B, heads, T, head_size) queries; K/V of each step (B, kv_heads, T, head_size); to (B, T, hidden).
    """
    groups = attention.heads // attention.kv_heads
    wide = [[one.repeat_interleave(groups, 1) for one in pair] for pair in (first, *later)]
    count, scale = queries.shape[2], queries.shape[3] ** -0.5
    causal = torch.ones(count, count, dtype=torch.bool, device=queries.device).tril()
    logits = (queries @ wide[0][0].transpose(2, 3)).masked_fill(~causal, float("-inf"))
    own = [(queries * keys).sum(-1, keepdim=True) for keys, _ in wide[1:]]
    shares = (scale * torch.cat([logits, *own], -1)).float().softmax(-1).to(queries.dtype)
    mixed = shares[..., :count] @ wide[0][1]
    for index, (_, values) in enumerate(wide[1:]):
        mixed = mixed + shares[..., count + index, None] * values
    return attention.merged(mixed)  # type: ignore[no-any-return]

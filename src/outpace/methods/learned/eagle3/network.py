"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer over fused low, middle and high states of the target.

A row holds a token and the state before it: at first the target's own three states, fused by a linear layer, later what
the drafter itself made for the row before. Its attention reads the token's embedding and that state, each behind its
norm, side by side. Training unrolls the drafter over its own outputs ("training-time test"), and asks for the target's
distribution only, not for its states. The draft vocabulary is a reduced one.

``norms="attdrift"`` places two norms otherwise (Attention Drift, Eldenk et al. 2026, arXiv 2605.09992): an RMSNorm on
each captured state before they are fused, and the final norm's output handed on to the next row, so that states keep
their size along a chain.

Ours: steps after the first run only the rows that drafting can reach, after the prompt and after tokens of the draft
vocabulary. The final norm begins as the target's, whose LM head reads what it makes.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.core.validation import StrictModel
from outpace.heads.base import Batch, Head, Teacher
from outpace.heads.blocks import DecoderLayer, initialised, shifted
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig, low_middle_high
from outpace.heads.kinds import kind
from outpace.heads.losses import soft_cross_entropy
from outpace.heads.unrolled import Pair, gathered, spread, unrolled
from outpace.targets.base import Target


class Eagle3Options(StrictModel):
    """Settings of an ``eagle3`` head."""

    steps: int = Field(4, ge=1, le=16, description="how far training unrolls the drafter over its own outputs")
    decay: float = Field(0.8, gt=0.0, le=1.0, description="weight of a step's loss relative to the one before")
    norms: Literal["eagle3", "attdrift"] = Field(
        "attdrift", description="where norms are placed: as EAGLE-3 has them, or as Attention Drift"
    )
    residual: Literal["state", "normed"] = Field(
        "state", description="what the layer adds to: its state, or the state behind its norm (norm_before_residual)"
    )


@kind("eagle3")
class Eagle3(Head):
    """Weights: ``fc``, ``layers.0`` with ``hidden_norm`` beside its own norms, ``norm``."""

    Options = Eagle3Options
    paper = "Li et al. 2025, arXiv 2503.01840"

    def __init__(self, config: HeadConfig, draft_vocabulary: DraftVocabulary) -> None:
        super().__init__(config, draft_vocabulary)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.aux_hidden_state_layers) * hidden, hidden, bias=False)
        layer = DecoderLayer(config, inputs=2 * hidden)
        layer.hidden_norm = nn.RMSNorm(hidden, config.epsilon)
        self.layers = nn.ModuleList([layer])
        self.norm = nn.RMSNorm(hidden, config.epsilon)
        if self.options.norms == "attdrift":
            self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, config.epsilon) for _ in config.aux_hidden_state_layers)
        initialised(self)

    @classmethod
    def aux_layers_of(cls, layers: int, options: Any) -> tuple[int, ...]:  # noqa: ARG003
        return low_middle_high(layers)

    def initialise(self, target: Target, teacher: Teacher) -> None:
        # The borrowed LM head expects the target's own norm before it; of a state of ones it shows its weights.
        ones = target.final_norm(torch.ones(1, self.config.hidden_size))[0]
        self.norm.weight.data.copy_(ones)

    def fused(self, states: list[Tensor]) -> Tensor:
        """The target's states of one token, (..., hidden) each, as the state that the next token's row begins with."""
        if self.options.norms == "attdrift":
            states = [norm(one) for norm, one in zip(self.fc_norm, states, strict=True)]
        found: Tensor = self.fc(torch.cat(states, -1).to(self.fc.weight.dtype))
        return found

    def handed_on(self, stream: Tensor) -> Tensor:
        """The state that the next row begins with, of the stream that left the layer."""
        found: Tensor = self.norm(stream) if self.options.norms == "attdrift" else stream
        return found

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        layer: Any = self.layers[0]
        attention = layer.self_attn
        shape = batch.tokens.shape
        state = self.fused([batch.states[layer] for layer in self.config.aux_hidden_state_layers]).flatten(0, 1)
        targets, place = teacher.target_probs(batch)
        # A token outside of the draft vocabulary cannot be learned, and nothing is drafted after one.
        wanted = batch.answer & (self.draft_vocabulary.t2d(len(teacher.embedding))[batch.tokens] >= 0)
        where = torch.arange(shape[1], device=state.device).expand(shape).flatten()
        alive = shifted(wanted, 2).flatten()
        rows = torch.arange(len(alive), device=state.device)
        first: Pair | None = None
        later: list[Pair] = []
        found: dict[str, Tensor] = {}
        total, weights = torch.zeros((), device=state.device), 0.0
        for step in range(self.options.steps):
            # Row t reads token t + 1 + step and predicts token t + 2 + step. Later steps see all rows of the first.
            alive = alive & shifted(wanted, 2 + step).flatten()
            chosen = alive[rows].nonzero()[:, 0]
            if step:
                rows, state = rows[chosen], state[chosen]
            embedded = teacher.embedding[shifted(batch.tokens, 1 + step).flatten()[rows]].to(state.dtype)
            normed = layer.hidden_norm(state)
            read = torch.cat([layer.input_layernorm(embedded), normed], -1)[None]
            if self.options.residual == "normed":
                state = normed
            keys, values = (spread(one, rows, shape) for one in attention.keys_values(read, where[rows] + step))
            if not step:
                rows, state, read = rows[chosen], state[chosen], read[:, chosen]
            queries = spread(attention.queries(read, where[rows] + step), rows, shape)
            if first is None:
                first = (keys, values)
            else:
                later.append((keys, values))
            attended = attention.o_proj(gathered(unrolled(queries, first, later), rows))
            stream = layer.feed(state + attended)
            there = shifted(place, 1 + step).flatten()[rows]
            loss, hits = soft_cross_entropy(self.norm(stream), self.draft_vocabulary, targets, there)
            total = total + self.options.decay**step * loss
            weights += self.options.decay**step
            found[f"agree_{step + 1}"] = hits
            state = self.handed_on(stream)
        return {"loss": total / weights, **found}

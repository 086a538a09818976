"""EAGLE (Li et al. 2024, arXiv 2401.15077): one decoder layer that predicts the target's next feature.

A row holds a token's embedding and the target's feature before it, joined by a linear layer; what leaves the layer is
the feature at the token, and the target's frozen LM head reads the next token from it. Features are the target's last
states behind its final norm. The layer has no norm before its attention, and none behind it: as the authors' has it.

Training: smooth L1 to the target's feature, and a tenth of cross entropy with the target's distribution; features that
are read carry uniform noise, because in decoding they are the drafter's own. Nothing is unrolled.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from outpace.core.validation import StrictModel
from outpace.heads.base import Batch, Head, Teacher
from outpace.heads.blocks import DecoderLayer, initialised
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig
from outpace.heads.kinds import kind
from outpace.heads.losses import soft_cross_entropy
from outpace.heads.unrolled import gathered, spread, unrolled


class EagleOptions(StrictModel):
    """Settings of an ``eagle`` head."""

    bias: bool = Field(
        False, description="whether the layer that joins embedding and feature has a bias, which vLLM does not load"
    )
    feature_weight: float = Field(1.0, ge=0.0, description="weight of the features' smooth L1 loss")
    word_weight: float = Field(0.1, ge=0.0, description="weight of the tokens' cross entropy")
    noise: float = Field(0.2, ge=0.0, description="width of the uniform noise on features that are read in training")


@kind("eagle")
class Eagle(Head):
    """Weights: ``fc`` and ``layers.0``."""

    Options = EagleOptions
    paper = "Li et al. 2024, arXiv 2401.15077"
    packs = True

    def __init__(self, config: HeadConfig, draft_vocabulary: DraftVocabulary) -> None:
        super().__init__(config, draft_vocabulary)
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=self.options.bias)
        self.layers = nn.ModuleList([DecoderLayer(config, first_norm=False)])
        initialised(self)

    @classmethod
    def aux_layers_of(cls, layers: int, options: Any) -> tuple[int, ...]:  # noqa: ARG003
        return (layers,)

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        layer: Any = self.layers[0]
        attention, shape = layer.self_attn, batch.tokens.shape
        features = teacher.normed(batch).to(self.fc.weight.dtype)
        targets, place = teacher.target_probs(batch)
        # Row t reads token t + 1, predicts the feature there and token t + 2.
        wanted = batch.answer & (self.draft_vocabulary.t2d(len(teacher.embedding))[batch.tokens] >= 0)
        rows = batch.ahead(wanted, 2).flatten().nonzero()[:, 0]
        read = features
        if self.training and self.options.noise:
            read = features + (torch.rand_like(features) - 0.5) * self.options.noise
        embedded = teacher.embedding[batch.ahead(batch.tokens, 1)].to(read.dtype)
        stream = self.fc(torch.cat([embedded, read], -1)).flatten(0, 1)
        where = batch.positions().flatten()
        everywhere = torch.arange(len(where), device=stream.device)
        keys, values = (spread(one, everywhere, shape) for one in attention.keys_values(stream[None], where))
        stream = stream[rows]
        queries = spread(attention.queries(stream[None], where[rows]), rows, shape)
        attended = attention.o_proj(gathered(unrolled(queries, (keys, values), [], batch.lengths), rows))
        predicted = layer.feed(stream + attended)
        right = batch.ahead(features, 1).flatten(0, 1)[rows]
        distance = functional.smooth_l1_loss(predicted.float(), right.float()) if len(rows) else predicted.sum() * 0.0
        there = batch.ahead(place, 1).flatten()[rows]
        entropy, hits = soft_cross_entropy(predicted, self.draft_vocabulary, targets, there)
        loss = self.options.feature_weight * distance + self.options.word_weight * entropy
        return {"loss": loss, "feature": distance.detach(), "words": entropy.detach(), "agree_1": hits}

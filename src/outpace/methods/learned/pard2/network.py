"""PARD-2 (An et al. 2026, arXiv 2605.08632): a small LM that predicts several tokens in one forward, after PARD (An et
al. 2025, arXiv 2504.18583).

Behind the last token stand rows of one learned mask, at the positions to come. They see the text and the masks before
them, and each predicts the token after its position, so one forward drafts a whole chain.

Training takes places of the text as anchors, each with masks behind it that see the text up to the anchor and no other
anchor's masks. Later masks are dropped: of the anchors with ``k`` masks a share of ``keep`` has another (the paper's
conditional drop, which keeps what a mask must see). Rows of the text are computed once, whatever hangs on them.

Confidence-adaptive tokens: a mask's prediction matters only if all before it are accepted. So a row's loss is weighted
by the product of the probabilities that the target gives to the tokens between anchor and row. A token that is not
in the draft vocabulary has probability 0: nothing after it can be reached.

Two modes: a row may carry the target's states before its token, fused by a linear layer and added to the embedding;
masks carry their anchor's. A share of the conversations is trained without, so that one drafter serves both ways.

Unlike in the papers, states stand behind a norm each instead of a fixed factor; only the target's distribution is
learned, not its tokens once more; layers begin as some of the target's, for there is no small model of its family.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.core.validation import StrictModel
from outpace.heads.base import Batch, Head, Teacher
from outpace.heads.blocks import DecoderLayer, initialised
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig, low_middle_high, shared_out
from outpace.heads.kinds import kind
from outpace.heads.losses import TeacherTargets, weighted_cross_entropy
from outpace.heads.pruned import take_layers
from outpace.targets.base import Target

FLOOR = 0.1
"""At least this share of the anchors has each mask."""


class Pard2Options(StrictModel):
    """Settings of a ``pard2`` head."""

    layers: int = Field(2, ge=1, le=32, description="how many layers it has; they share one MLP's width")
    ahead: int = Field(8, ge=1, le=32, description="tokens that one forward predicts")
    anchors: float = Field(0.5, gt=0.0, le=1.0, description="share of the answers' tokens that masks hang on")
    keep: float = Field(0.7, gt=0.0, le=1.0, description="share of the anchors that keep their next mask")
    weights: Literal["target", "even"] = Field("target", description="confidence-adaptive weights of tokens, or none")
    without: float = Field(0.2, ge=0.0, le=1.0, description="share of the conversations without the target's states")
    pruned: bool = Field(True, description="begin with layers of the target, where its weights can be read")


class Masks(NamedTuple):
    """Mask rows of a batch, M a conversation, the same shape in each: one depth after the other."""

    anchors: Tensor
    """(B, A) long: where the anchors are."""
    real: Tensor
    """(B, A) bool: conversations with few places have fewer anchors."""
    slots: Tensor
    """(M,) long: the anchor of each row, an index into A."""
    depths: Tensor
    """(M,) long: how many positions behind its anchor, 1 to ahead - 1."""


@kind("pard2")
class Pard2(Head):
    """Weights: ``fc`` over the normed auxiliary hidden states (``fc_norm``), ``mask``, ``layers.0``, ..., ``norm``."""

    Options = Pard2Options
    paper = "An et al. 2026, arXiv 2605.08632"

    def __init__(self, config: HeadConfig, draft_vocabulary: DraftVocabulary) -> None:
        super().__init__(config, draft_vocabulary)
        hidden = config.hidden_size
        self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, config.epsilon) for _ in config.aux_hidden_state_layers)
        self.fc = nn.Linear(len(config.aux_hidden_state_layers) * hidden, hidden, bias=False)
        self.mask = nn.Parameter(torch.empty(hidden))
        nn.init.normal_(self.mask, std=0.02)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(hidden, config.epsilon)
        initialised(self)

    @classmethod
    def aux_layers_of(cls, layers: int, options: Any) -> tuple[int, ...]:  # noqa: ARG003 - the same in both modes
        return low_middle_high(layers)

    @classmethod
    def depth_of(cls, options: Any) -> int:
        return int(options.layers)

    @classmethod
    def shapes_of(cls, hidden: int, size: str, options: Any) -> dict[str, int]:
        return shared_out(hidden, size, options.layers)

    def initialise(self, target: Target, teacher: Teacher) -> None:
        embedded = teacher.embedding.float()
        with torch.no_grad():
            self.mask.copy_(embedded.mean(0))
            # Normed states come out of the linear layer as large as a token's embedding.
            self.fc.weight.mul_(embedded.square().mean().sqrt() / (0.02 * self.fc.in_features**0.5))
        source = target.decoder_spec() if self.options.pruned else None
        if source is not None:
            take_layers(source, self.config, list(self.layers), self.norm)  # type: ignore[arg-type]

    def fused(self, states: list[Tensor]) -> Tensor:
        """The target's states of one token, (..., hidden) each, as what the next token's row carries."""
        normed = [norm(one.to(self.fc.weight.dtype)) for norm, one in zip(self.fc_norm, states, strict=True)]
        found: Tensor = self.fc(torch.cat(normed, -1))
        return found

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        dtype, tokens = self.fc.weight.dtype, batch.tokens
        carried = torch.zeros_like(batch.states[self.config.aux_hidden_state_layers[0]], dtype=dtype)
        carried[:, 1:] = self.fused([batch.states[layer][:, :-1] for layer in self.config.aux_hidden_state_layers])
        if self.training:
            with_states = torch.rand(len(tokens), 1, 1, device=tokens.device) >= self.options.without
            carried = carried * with_states
        masks = self.masks(batch)
        there = masks.anchors[:, masks.slots]
        text = teacher.embedding[tokens].to(dtype) + carried
        hung = self.mask.to(dtype) + torch.take_along_dim(carried, there[..., None], 1)
        states = self.norm(self.run(text, hung, masks))

        targets, place = teacher.target_probs(batch)
        wanted = torch.zeros_like(batch.answer)
        wanted[:, :-1] = batch.answer[:, 1:]
        certain = self.certain(batch, targets, place)
        # The text's rows predict the next token; a mask's row the token after its own position.
        where = torch.cat(
            [torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), there + masks.depths], 1
        )
        inside = where < tokens.shape[1]
        where = where.clamp_max(tokens.shape[1] - 1)
        right = inside & torch.take_along_dim(wanted, where, 1)
        right[:, tokens.shape[1] :] &= masks.real[:, masks.slots]
        weights = torch.cat([torch.ones_like(certain), reach(certain, there, masks.depths)], 1)
        if self.options.weights == "even":
            weights = torch.ones_like(weights)
        depths = torch.cat([torch.zeros_like(tokens[0]), masks.depths]).expand_as(where)

        kept = right.flatten().nonzero()[:, 0]
        losses, hits = weighted_cross_entropy(
            states.flatten(0, 1)[kept],
            self.draft_vocabulary,
            targets,
            torch.take_along_dim(place, where, 1).flatten()[kept],
            weights.flatten()[kept],
        )
        found = {"loss": losses}
        depth_of = depths.flatten()[kept]
        for depth in range(self.options.ahead):
            some = depth_of == depth
            found[f"agree_{depth + 1}"] = (hits & some).sum() / some.sum().clamp_min(1)
        return found

    def masks(self, batch: Batch) -> Masks:
        """Which anchors have masks, and how many: drawn anew for every batch, the same for an evaluation."""
        wanted = torch.zeros_like(batch.answer)
        wanted[:, :-1] = batch.answer[:, 1:]
        device, (rows, length) = wanted.device, wanted.shape
        count = max(1, min(length, round(self.options.anchors * float(wanted.sum()) / rows)))
        draws = None if self.training else torch.Generator(device).manual_seed(0)
        order = torch.rand(rows, length, device=device, generator=draws).masked_fill(~wanted, -1.0)
        ranks, anchors = order.topk(count, dim=1)
        sizes = [round(count * max(self.options.keep**depth, FLOOR)) for depth in range(1, self.options.ahead)]
        slots = [torch.arange(size, device=device) for size in sizes]
        depths = [torch.full((size,), depth, device=device) for depth, size in enumerate(sizes, start=1)]
        none = torch.zeros(0, dtype=torch.long, device=device)
        return Masks(anchors, ranks >= 0.0, torch.cat([none, *slots]), torch.cat([none, *depths]))

    def certain(self, batch: Batch, targets: TeacherTargets, place: Tensor) -> Tensor:
        """(B, T): the probability that the target gave, over the draft vocabulary, to each token of an answer.

        0 for tokens outside of the draft vocabulary, 1 outside of answers.
        """
        drafted = self.draft_vocabulary.t2d(self.config.target.vocab_size)[batch.tokens[:, 1:]]
        given = targets.p[place[:, :-1], drafted.clamp_min(0)].float() * (drafted >= 0)
        found = torch.ones_like(batch.tokens, dtype=torch.float32)
        found[:, 1:] = torch.where(batch.answer[:, 1:], given, 1.0)
        return found

    def run(self, text: Tensor, hung: Tensor, masks: Masks) -> Tensor:
        """The layers over the text's rows, (B, T, hidden), and the masks', (B, M, hidden): (B, T + M, hidden)."""
        length = text.shape[1]
        where = torch.arange(length, device=text.device)
        there = masks.anchors[:, masks.slots]
        positions = there + masks.depths
        own = (masks.slots[:, None] == masks.slots) & (masks.depths[:, None] >= masks.depths)
        seen = torch.cat([where <= there[..., None], own.expand(len(text), *own.shape)], -1)[:, None]
        layer: Any
        for layer in self.layers:
            attention = layer.self_attn
            normed, normed_hung = layer.input_layernorm(text), layer.input_layernorm(hung)
            keys, values = attention.keys_values(normed, where)
            beside, besides = attention.keys_values(normed_hung, positions)
            text = layer.feed(text + attention.attend(attention.queries(normed, where), keys, values, None))
            if hung.shape[1]:
                keys, values = torch.cat([keys, beside], 2), torch.cat([values, besides], 2)
                found = attention.attend(attention.queries(normed_hung, positions), keys, values, seen)
                hung = layer.feed(hung + found)
        return torch.cat([text, hung], 1)


def reach(certain: Tensor, anchors: Tensor, depths: Tensor) -> Tensor:
    """How likely everything between anchor and row is accepted, (B, M) float32: the product of ``certain`` (B, T) over
    the ``depths`` (M,) positions behind ``anchors`` (B, M)."""
    sums = certain.double().clamp_min(1e-9).log().cumsum(1)
    last = (anchors + depths).clamp_max(certain.shape[1] - 1)
    return (torch.take_along_dim(sums, last, 1) - torch.take_along_dim(sums, anchors, 1)).exp().float()
